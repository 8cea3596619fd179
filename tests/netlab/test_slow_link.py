"""A link that gets slow while a run goes on: seen by all ranks' waits, and named by the connections that end at it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import plan_slow_link
from paceline.run.records import read_records
from tests.cli.job import SMALL, TEXT
from tests.netlab.lab import Host, Lab
from tests.pool.launch import Launcher

WIDE = ["model.dim=256", "model.num_layers=3", "model.num_heads=4", "model.ffn_dim=1024", "batch.global_batch=12"]
"""Some 10 MB of gradients: enough for a link of 300 Mbit/s to be felt."""

SLOW_FROM_STEP = 15
STEPS = 35


def _slowed(launch: Launcher, lab: Lab, folder: Path, name: str, host: Host) -> list[tuple[int | None, str]]:
    """Train over the lab's hosts while the link of one gets slow; the stragglers on record, as (rank, cause)."""
    words = [
        "train", *SMALL, *WIDE, f"run.steps={STEPS}", f"run.name={name}", "run.log_every=5", "parallel.compile=false",
        "checkpoint.every=end",
    ]  # fmt: skip
    lab.put_right()
    running = [
        launch.start(words, prefix=lab.prefix(one), env=lab.variables(rank)) for rank, one in enumerate(lab.hosts)
    ]
    deadline = time.monotonic() + 60.0
    while not any(r["step"] >= SLOW_FROM_STEP for r in read_records(folder / "runs" / name, kinds=("step",))):
        assert time.monotonic() < deadline, "the run did not get on"
        time.sleep(0.05)
    lab.link(host, 300.0)
    for one in running:
        end = one.wait(180.0)
        assert end.returncode == 0, end.stderr
    lab.put_right()
    found = read_records(folder / "runs" / name, kinds=("straggler",))
    return [(r["rank"], r["cause"]) for r in found if r["step"] > SLOW_FROM_STEP]


# R16
@pytest.mark.limit(260)
def test_a_slow_link_is_localised(netlab: Callable[..., Lab], launch: Launcher, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    lab = netlab((3,))
    slow = random.randrange(3)
    print(f"the link of rank {slow}")
    found = _slowed(launch, lab, tmp_path, "one", lab.hosts[slow])
    assert (slow, "link") in found and all(rank == slow for rank, cause in found if cause == "link"), found


@pytest.mark.soak
@pytest.mark.limit(1500)
def test_a_slow_link_is_localised_ten_times_of_ten(
    netlab: Callable[..., Lab], launch: Launcher, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    lab = netlab((3,))
    for trial in range(10):
        slow = trial % 3
        found = _slowed(launch, lab, tmp_path, f"trial-{trial}", lab.hosts[slow])
        assert (slow, "link") in found, (trial, found)


# R16
@pytest.mark.soak
@pytest.mark.limit(300)
def test_the_step_over_a_slow_link_is_what_the_plan_says(netlab: Callable[..., Lab]) -> None:
    (found,) = plan_slow_link.measure(rounds=1, steps=plan_slow_link.STEPS)
    assert abs(found["error"]) <= plan_slow_link.WITHIN, found

"""Training over several hosts: the ranks meet over a network, and are one run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from paceline.run.records import latest_steps, read_records
from tests.cli.job import SMALL, TEXT
from tests.netlab.lab import Lab
from tests.pool.launch import Launcher

STEPS = 2


def test_two_hosts_train_one_model(netlab: Callable[..., Lab], launch: Launcher, tmp_path: Path) -> None:
    lab = netlab((1, 1), mbit=200.0, uplink_mbit=200.0)
    (tmp_path / "text.txt").write_text(TEXT)
    words = ["train", *SMALL, f"run.steps={STEPS}", "run.name=hosts", "parallel.compile=false"]
    running = [
        launch.start(words, prefix=lab.prefix(host), env=lab.variables(rank)) for rank, host in enumerate(lab.hosts)
    ]
    for one in running:
        end = one.wait(90.0)
        assert end.returncode == 0, end.stderr
    records = list(read_records(tmp_path / "runs/hosts"))
    assert [step["step"] for step in latest_steps(records)] == list(range(1, STEPS + 1))
    (started,) = (record for record in records if record["kind"] == "run_started")
    assert (started["world_size"], started["host"]) == (2, "r0h0")

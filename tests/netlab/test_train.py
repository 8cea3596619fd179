"""Training over several hosts: the ranks meet over a network, and are one run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.run.records import latest_steps, read_records
from tests.cli.job import SMALL, TEXT
from tests.netlab.lab import Host, Lab
from tests.pool.launch import Launcher, Running

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


def nodes(meeting: Host, nodes: str, steps: int) -> list[str]:
    """One rank on each host; they meet at one of them."""
    return [
        "train", *SMALL, f"run.steps={steps}", "parallel.compile=false", "data.workers=0", "run.log_every=1",
        f"launch.nodes={nodes}", f"launch.rendezvous={meeting.address}:29400", "launch.affinity=none",
        "launch.threads=1", "checkpoint.every=5", "batch.global_batch=12", "--procs", "1", "--json",
    ]  # fmt: skip


def until(run: Path, world: int, timeout: float, count: int = 2) -> None:
    """Wait for an attempt with so many ranks and `count` steps."""
    deadline = time.monotonic() + timeout
    while True:
        attempts = [(r["attempt"], r["world_size"]) for r in read_records(run, kinds=("run_started",))]
        steps = [r for r in read_records(run, kinds=("step",)) if attempts and r["attempt"] == attempts[-1][0]]
        if attempts and attempts[-1][1] == world and len(steps) >= count:
            return
        assert time.monotonic() < deadline, f"no {world} ranks with {count} steps in {timeout:.0f} s: {attempts}"
        time.sleep(0.2)


def test_the_same_command_on_each_host_makes_one_run(
    netlab: Callable[..., Lab], launch: Launcher, tmp_path: Path
) -> None:
    lab = netlab((1, 1), mbit=200.0, uplink_mbit=200.0)
    (tmp_path / "text.txt").write_text(TEXT)
    running = [launch.start(nodes(lab.hosts[0], "2", STEPS), prefix=lab.prefix(host)) for host in lab.hosts]
    for one in running:
        end = one.wait(90.0)
        assert end.returncode == 0 and json.loads(end.stdout)["steps"] == STEPS, end.stderr
        assert "speaks through eth0" in end.stderr
    (started,) = read_records(tmp_path / "runs/default", kinds=("run_started",))
    assert started["world_size"] == 2


# BL-76
@pytest.mark.soak
@pytest.mark.limit(400)
@pytest.mark.parametrize("leads", [False, True])
def test_a_host_that_is_cut_off_is_lost_to_the_rest_and_comes_back(
    netlab: Callable[..., Lab], launch: Launcher, tmp_path: Path, leads: bool
) -> None:
    lab = netlab((1, 1, 1), mbit=200.0, uplink_mbit=200.0)
    (tmp_path / "text.txt").write_text(TEXT)
    run = tmp_path / "runs" / "default"
    # Nodes are numbered by their names, and the first one leads.
    lost, second, first = lab.hosts if leads else lab.hosts[::-1]

    def start(host: Host) -> Running:
        return launch.start(nodes(first, "1:3", 100000), prefix=lab.prefix(host))

    staying = [start(first), start(second)]
    cut_off = start(lost)
    until(run, 3, 90.0)
    lab.cut(lost)
    began = time.monotonic()
    # Where the one that is lost held the lease, the others wait until that has expired.
    until(run, 2, 150.0 if leads else 60.0)
    print(f"on without it after {time.monotonic() - began:.1f} s")
    end = cut_off.wait(90.0)
    assert end.returncode in (74, 76), end.stderr
    lab.mend(lost)
    again = start(lost)
    until(run, 3, 90.0)
    assert launch(["stop", "runs/default"], timeout=60).returncode == 0
    for one in (*staying, again):
        assert one.wait(60.0).returncode == 75
    faults = list(read_records(run, kinds=("fault",)))
    print([(fault["host"], fault["message"]) for fault in faults])
    assert any(lost.name in fault["message"] for fault in faults)
    assert launch.left_over() == {}


# R15
@pytest.mark.soak
@pytest.mark.limit(200)
def test_a_link_that_is_down_for_five_seconds_costs_one_restart_at_most(
    netlab: Callable[..., Lab], launch: Launcher, tmp_path: Path
) -> None:
    lab = netlab((1, 1), mbit=200.0, uplink_mbit=200.0)
    (tmp_path / "text.txt").write_text(TEXT)
    run = tmp_path / "runs" / "default"
    running = [launch.start(nodes(lab.hosts[0], "2", 100000), prefix=lab.prefix(host)) for host in lab.hosts]
    until(run, 2, 90.0, count=20)
    lab.cut(lab.hosts[1])
    time.sleep(5.0)
    lab.mend(lab.hosts[1])
    before = sum(1 for _ in read_records(run, kinds=("step",)))
    until(run, 2, 90.0)
    deadline = time.monotonic() + 60.0
    while sum(1 for _ in read_records(run, kinds=("step",))) < before + 20:
        assert time.monotonic() < deadline and all(one.process.poll() is None for one in running)
        time.sleep(0.2)
    assert launch(["stop", "runs/default"], timeout=60).returncode == 0
    assert [one.wait(60.0).returncode for one in running] == [75, 75]
    restarts = [r["reason"] for r in read_records(run, kinds=("restart",))]
    print(restarts)
    assert len(restarts) <= 1 and launch.left_over() == {}

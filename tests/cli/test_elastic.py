"""A run whose number of local ranks changes while it goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.run.control import ask_procs
from paceline.run.records import latest_steps, read_records
from tests.cli.job import SMALL, TEXT
from tests.pool.launch import Launcher, Running

WORDS = [
    "train", *SMALL, "parallel.compile=false", "parallel.precision=fp64", "data.workers=0", "run.log_every=1",
    "run.record_samples=true", "optimizer.schedule=constant", "batch.global_batch=12",
]  # fmt: skip


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


def resize(running: Running, run: Path, procs: int) -> int:
    """Ask for `procs` ranks and wait until they have done two steps; returns the step after which they began."""
    ask_procs(run, procs)
    running.until(f"control/procs = {procs}: stopping")
    running.until(f": dp_replicate={procs}\n", timeout=30)
    began = len(list(read_records(run, kinds=("run_started",)))) + 1
    while len(started := list(read_records(run, kinds=("run_started",)))) < began:
        running.until("", timeout=1)
        assert running.process.poll() is None, running.stderr[-3000:]
    step = int(started[-1]["step"])
    running.until(f"step {step + 2}/", timeout=40)
    return step


@pytest.mark.limit(180)
def test_ranks_go_and_come_and_the_curve_is_that_of_the_undisturbed_run(launch: Launcher, text: Path) -> None:
    run = text / "runs" / "default"
    running = launch.start([*WORDS, "run.steps=100000", "--procs", "2:4", "--json"])
    running.until("step 3/", timeout=60)
    ask_procs(run, 7)
    running.until("control/procs = '7' changes nothing: the range is 2:4")
    assert resize(running, run, 2) >= 3
    resize(running, run, 4)
    stopped = launch(["stop", "runs/default"])
    assert stopped.returncode == 0, stopped.stderr
    assert running.wait(20).returncode == 75
    end = max(r["step"] for r in read_records(run, kinds=("step",))) + 3
    last = launch([*WORDS, f"run.steps={end}", "--procs", "4", "--json"], timeout=90)
    straight = launch([*WORDS, f"run.steps={end}", "run.name=straight", "--procs", "4"], timeout=90)
    assert last.returncode == straight.returncode == 0, last.stderr + straight.stderr
    assert json.loads(last.stdout)["attempts"] == 4

    curve, samples = left(run)
    expected, others = left(text / "runs" / "straight")
    assert samples == others
    # Only the order of sums differs between numbers of ranks: far below the promised 1e-5 in float64.
    assert curve == pytest.approx(expected, rel=1e-9)
    restarts = [r["reason"] for r in read_records(run, kinds=("restart",))]
    assert restarts == ["control/procs: 2 ranks instead of 4", "control/procs: 4 ranks instead of 2"]
    worlds = [(r["world_size"], r["accumulation"] * r["microbatch"]) for r in read_records(run, kinds=("run_started",))]
    assert worlds[:3] == [(4, 3), (2, 6), (4, 3)]
    assert not list(read_records(run, kinds=("fault",)))


def left(run: Path) -> tuple[dict[int, float], dict[int, list[int]]]:
    records = list(read_records(run, kinds=("run_started", "step", "samples")))
    ids = [(r["step"], r["ids"]) for r in records if r["kind"] == "samples"]
    assert len(ids) == len(dict(ids)), "a step was done twice"
    return {r["step"]: r["loss"] for r in latest_steps(records)}, dict(ids)


def test_a_range_that_cannot_hold_the_global_batch_is_refused_with_each_number(launch: Launcher, text: Path) -> None:
    refused = launch([*WORDS, "run.steps=3", "--procs", "2:7", "--json"])
    assert refused.returncode == 78
    error = json.loads(refused.stdout)["error"]
    assert set(error["values"]["refused"]) == {"5", "7"} and error["values"]["hold"] == [2, 3, 4, 6]
    assert "5 ranks: batch.global_batch: 12 sequences do not divide over 5 data ranks" in error["message"]
    fixed = launch([*WORDS, "run.steps=3", "parallel.dp_shard=4", "--procs", "2:4"])
    assert fixed.returncode == 78 and "2 ranks: " in fixed.stderr
    for procs in ("4:2", "0:2", "two", "2:"):
        assert launch([*WORDS, "--procs", procs]).returncode == 2

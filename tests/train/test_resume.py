"""Exact resume: stopped or killed and resumed is the run that was never stopped, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.savers import hooked
from tests.pool.pool import Pool
from tests.train.attempts import STEPS, attempts, left, said

LAYOUTS = {
    "one process": (1, ()),
    "ddp-2": (2, ()),
    "ddp-3": (3, ()),
    "ddp-4, accumulating": (4, ("batch.microbatch=1",)),
    "fsdp-2 stage 3": (2, ("parallel.dp_shard=2",)),
    "fsdp-3 stage 2": (3, ("parallel.dp_shard=3", "parallel.zero_stage=2", "batch.microbatch=2")),
    "fsdp-4 stage 1": (4, ("parallel.dp_shard=4", "parallel.zero_stage=1", "batch.microbatch=1")),
    "hsdp-2x2": (4, ("parallel.dp_replicate=2", "parallel.dp_shard=2")),
    "tp-2": (2, ("parallel.tp=2",)),
    "fsdp-2, tp-2": (4, ("parallel.dp_shard=2", "parallel.tp=2")),
    "cp-2": (2, ("parallel.cp=2",)),
    "fsdp-2, cp-2": (4, ("parallel.dp_shard=2", "parallel.cp=2", "model.attention_dropout=0.1")),
}
STOPPED = ("one process", "fsdp-2 stage 3")
"""Ended as if told to; the others are killed after step 6, the last save being that of step 4."""


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.limit(90)
def test_a_resumed_run_is_the_run_that_was_never_stopped(pool: Pool, tmp_path: Path, name: str) -> None:
    # R1, BL-26, BL-35, BL-38: dropout and evaluations are in it; 3 ranks are where the order of sums could change.
    ranks, layout = LAYOUTS[name]
    words = (*layout, "run.eval_every=3", f"data.workers={int(ranks == 3)}")
    broken = (*words, "run.name=broken", "checkpoint.every=4")
    end = {"stop": 5} if name in STOPPED else {"kill": 6}
    calls: list[Any] = [((*words, "run.name=straight"), {}), (broken, end), (broken, {})]
    pool.run(attempts, ranks, tmp_path, calls, timeout=80)
    whole, resumed = left(tmp_path / "runs" / "straight"), left(tmp_path / "runs" / "broken")
    assert list(whole.curve) == list(range(1, STEPS + 1)) and whole.verdicts == []
    assert resumed.curve == whole.curve
    assert resumed.samples == whole.samples
    assert resumed.tensors == whole.tensors
    assert resumed.state == whole.state
    assert resumed.verdicts == ["unknown" if name in STOPPED else "exact"]


@pytest.mark.limit(60)
def test_the_next_attempt_waits_for_a_save_that_its_ranks_did_not_live_to_see(pool: Pool, tmp_path: Path) -> None:
    # All had copied their part when they were killed; each file takes the writer a while.
    words = ("checkpoint.every=4", "run.name=broken")
    calls: list[Any] = [(words, {"kill": 4, "writer": hooked("slow", 0.4)}), (words, {}), (("run.name=straight",), {})]
    texts = pool.run(attempts, 2, tmp_path, calls, timeout=50)[0]
    assert "waiting for the checkpoint writer (pid" in texts[1] and "resuming after step 4" in texts[1]
    broken, straight = left(tmp_path / "runs" / "broken"), left(tmp_path / "runs" / "straight")
    assert (broken.curve, broken.tensors, broken.state) == (straight.curve, straight.tensors, straight.state)


@pytest.mark.limit(60)
def test_steps_done_twice_are_on_record_once(pool: Pool, tmp_path: Path) -> None:  # BL-93
    words = ("checkpoint.every=4", "run.eval_every=5")
    pool.run(attempts, 2, tmp_path, [(words, {"kill": 7}), (words, {})], timeout=50)
    run = tmp_path / "runs" / "default"
    found = said(run, "run_started", "step", "checkpoint", "certificate")
    for number in (1, 2):
        steps = [r["step"] for r in found if r["kind"] == "step" and r["attempt"] == number]
        assert steps == sorted(set(steps))
    assert [r["step"] for r in found if r["kind"] == "run_started"] == [0, 4]
    assert sorted(left(run).curve) == list(range(1, STEPS + 1))
    certificate = next(r for r in found if r["kind"] == "certificate")
    assert (certificate["resumed_step"], certificate["step"], certificate["same_layout"]) == (4, 5, True)
    assert certificate["loss"] == certificate["expected_loss"] == left(run).curve[5][0]
    resumed = next(r for r in found if r["kind"] == "checkpoint" and r["state"] == "resumed")
    assert resumed["step"] == 4 and resumed["path"].endswith("step-00000004") and resumed["bytes"] > 0
    assert {p.name for p in (tmp_path / "runs").iterdir()} == {"default"}

"""Exact resume: stopped and resumed is the run that was never stopped, bit for bit; on other layouts to rounding."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pool.pool import Pool
from tests.train.attempts import STEPS, attempt, left

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


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.limit(90)
def test_a_resumed_run_is_the_run_that_was_never_stopped(pool: Pool, tmp_path: Path, name: str) -> None:
    # R1, BL-26, BL-35, BL-38: dropout, a loader process and an evaluation are in it; 3 ranks are where sums could change.
    ranks, words = LAYOUTS[name]
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    for folder in (straight, stopped):
        folder.mkdir()
    pool.run(attempt, ranks, straight, (*words, "run.eval_every=4"), timeout=60)
    pool.run(attempt, ranks, stopped, (*words, "run.eval_every=4"), 5, timeout=60)
    pool.run(attempt, ranks, stopped, (*words, "run.eval_every=4"), timeout=60)
    whole, resumed = left(straight / "runs" / "default"), left(stopped / "runs" / "default")
    assert resumed.curve == whole.curve and list(whole.curve) == list(range(1, STEPS + 1))
    assert resumed.samples == whole.samples
    assert resumed.tensors == whole.tensors
    assert resumed.state == whole.state

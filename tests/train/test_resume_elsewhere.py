"""One run, stopped and resumed on another layout again and again: curve, samples and evaluation of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.run.records import read_records
from tests.pool.pool import Pool
from tests.train.attempts import attempt, left

STEPS = 12
WORDS = (
    "parallel.precision=fp64", "model.num_heads=4", "model.num_kv_heads=2", "model.qk_norm=true", "model.vocab_size=259",
    "model.attention_dropout=0.1", "checkpoint.keep=9", f"run.steps={STEPS}", "model.num_layers=4",
    "model.tie_embeddings=true",
)  # fmt: skip
TENSOR = (
    (1, (), 2),
    (2, ("parallel.tp=2",), 4),
    (4, ("parallel.tp=2", "parallel.dp_shard=2"), 5),
    (3, ("parallel.dp_shard=3",), 6),
    (4, ("parallel.tp=4",), 8),
    (4, ("parallel.tp=2", "parallel.sequence_parallel=false"), 10),
    (2, (), None),
)
CONTEXT = (
    (2, ("parallel.cp=2",), 2),
    (4, ("parallel.cp=2", "parallel.dp_shard=2"), 4),
    (1, (), 5),
    (4, ("parallel.cp=4", "parallel.cp_method=alltoall"), 7),
    (4, ("parallel.cp=2", "parallel.tp=2"), 9),
    (3, ("parallel.dp_shard=3",), 10),
    (4, ("parallel.cp=2",), None),
)
PIPELINE = (
    (2, ("parallel.pp=2",), 2),
    (4, ("parallel.pp=2", "parallel.dp_shard=2", "parallel.pp_schedule=gpipe"), 4),
    (1, (), 5),
    (2, ("parallel.pp=2", "parallel.pp_schedule=zbv"), 7),
    (4, ("parallel.pp=2", "parallel.tp=2"), 8),
    (4, ("parallel.pp=4", "batch.microbatch=3"), 10),
    (2, ("parallel.dp_shard=2",), None),
)
"""Ranks, layout, and the step at which it is stopped."""


@pytest.mark.parametrize("chain", [pytest.param(TENSOR, id="tensor"), pytest.param(CONTEXT, id="context"),
                                   pytest.param(PIPELINE, id="pipeline")])  # fmt: skip
@pytest.mark.limit(180)
def test_any_layout_resumes_what_any_other_saved(
    pool: Pool, tmp_path: Path, chain: tuple[tuple[int, tuple[str, ...], int | None], ...]
) -> None:
    # R2, BL-22, BL-36, BL-53: dropout's masks, samples by data rank, odd vocabularies and shared heads are in it; BL-38 and
    # BL-47: moments, without which the first step after a resume would differ; under stages BL-15 (the loss that the first
    # rank records is the last stage's), BL-52 (the table is tied) and BL-62 (samples and labels after a resume).
    straight, moved = tmp_path / "straight", tmp_path / "moved"
    for folder in (straight, moved):
        folder.mkdir()
    pool.run(attempt, 1, straight, WORDS, timeout=60)
    for ranks, words, stop in chain:
        pool.run(attempt, ranks, moved, (*WORDS, *words), stop, timeout=60)
    whole, resumed = left(straight / "runs" / "default"), left(moved / "runs" / "default")
    assert list(resumed.curve) == list(range(1, STEPS + 1))
    for step, (loss, norm) in whole.curve.items():
        assert resumed.curve[step] == pytest.approx((loss, norm), rel=1e-9)
    assert resumed.samples == whole.samples
    assert len(resumed.verdicts) == len(chain) - 1 and "different" not in resumed.verdicts
    assert resumed.tensors.keys() == whole.tensors.keys()
    assert last_eval(moved) == pytest.approx(last_eval(straight), rel=1e-9)


def last_eval(folder: Path) -> float:
    """Of the last step, over all samples of the eval set, each once."""
    return float([r["loss"] for r in read_records(folder / "runs" / "default", kinds=("eval",))][-1])

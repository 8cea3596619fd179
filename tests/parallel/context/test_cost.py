"""What a split sequence is said to need: less by the degree, but for what is gathered for a moment."""

from __future__ import annotations

import pytest

from paceline.job.load import load_job
from paceline.job.resolve import Resolved, resolve_job, resolved_cost
from paceline.parallel.context.config import GATHER_BYTES, heads_at_once
from paceline.parallel.context.cost import gathered_bytes, transient_bytes
from paceline.parallel.memory import work_of
from tests.parallel.context.test_split import HOST

MODEL = ["model.num_layers=8", "model.dim=1024", "model.num_heads=16", "model.num_kv_heads=4", "model.ffn_dim=2048",
         "model.vocab_size=512", "model.max_sequence_length=16384", "data.sequence_length=16384", "batch.global_batch=1",
         "parallel.precision=fp32", "parallel.compile=false", "parallel.dp_replicate=1"]  # fmt: skip


def resolved(cp: int, *words: str) -> Resolved:
    return resolve_job(load_job(None, [*MODEL, f"parallel.cp={cp}", *words]), cp, HOST)


@pytest.mark.parametrize("cp", [2, 4, 8])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_activations_fall_by_the_degree_at_16k(cp: int, recompute: str) -> None:
    words = (f"parallel.recompute={recompute}",)
    alone, split = resolved(1, *words), resolved(cp, *words)
    work = work_of(split.spec, split.batch, 16384, "fp32", split.transforms)
    passing = transient_bytes(work, split.layout, split.context)
    assert 0 < passing <= 3 * GATHER_BYTES
    assert split.memory.activations_bytes - passing == pytest.approx(alone.memory.activations_bytes / cp, rel=1e-3)
    assert split.memory.logits_bytes == pytest.approx(alone.memory.logits_bytes / cp, rel=1e-3)
    assert split.memory.parameters_bytes == alone.memory.parameters_bytes


def test_no_byte_is_sent_for_what_another_rank_has_to_know_anyway() -> None:
    """Gathered twice and reduced once, whatever the degree: only the share that comes from others grows with it."""
    for cp in (2, 4):
        job = resolved(cp)
        each = gathered_bytes(work_of(job.spec, job.batch, 16384, "fp32"), job.layout)
        assert each == 2 * 16384 * 4 * 64 * 4
        sizes = [c.size_bytes for c in resolved_cost(job).collectives if c.axis == "cp" and "keys" in c.purpose]
        assert sizes == [8 * each] * 3


def test_state_is_split_over_the_ranks_of_a_sequence_too_where_it_is_split_at_all() -> None:
    alone = resolved(1).memory
    words = [*MODEL, "batch.global_batch=2", "parallel.cp=2", "parallel.dp_shard=2", "parallel.zero_stage=1"]
    split = resolve_job(load_job(None, words), 4, HOST).memory
    assert split.moments_bytes == pytest.approx(alone.moments_bytes / 4, rel=1e-3)


@pytest.mark.parametrize(("kv_heads", "length", "at_once"), [(4, 1024, 4), (8, 16384, 1), (8, 8192, 2), (1, 2**20, 1)])
def test_heads_are_gathered_together_while_they_are_small(kv_heads: int, length: int, at_once: int) -> None:
    assert heads_at_once(kv_heads, 1, length, 64, 4) == at_once

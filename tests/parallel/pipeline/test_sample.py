"""Text by a model whose parts are on several ranks."""

from __future__ import annotations

import pytest
import torch

from paceline.model.generate import generate
from paceline.model.transformer import Decoder
from paceline.parallel.mesh import build_mesh
from paceline.train import startup
from tests.conformance.cases import Case, resolve_case
from tests.pool.pool import Pool

SPLITS = [
    Case("1f1b", 2, ("parallel.pp=2", "batch.microbatch=2")),
    Case(
        "zbv, tied", 2, ("parallel.pp=2", "parallel.pp_schedule=zbv", "model.num_layers=4", "model.tie_embeddings=true")
    ),
    Case("slices of the vocabulary and of the positions", 4, ("parallel.pp=2", "parallel.tp=2", "batch.microbatch=2")),
    Case("shards", 4, ("parallel.pp=2", "parallel.dp_shard=2", "batch.microbatch=2")),
]


def text(rank: int, world_size: int, case: Case, temperature: float) -> list[int]:
    resolved, cpu = resolve_case(case), torch.device("cpu")
    model, applied = startup.build_model(resolved, build_mesh(resolved.layout, cpu), cpu)
    assert isinstance(model, Decoder)
    stages = applied.stages
    return generate(
        model, [3, 1], 9, vocabulary=resolved.spec.vocab_size, temperature=temperature, seed=5,
        logits_at=None if stages is None else stages.logits_at,
    )  # fmt: skip


@pytest.mark.parametrize("case", SPLITS, ids=lambda case: case.name)
def test_a_sample_through_stages_is_that_of_one_process(pool: Pool, case: Case) -> None:
    words = tuple(word for word in case.overrides if word.startswith("model."))
    for temperature in (0.0, 1.5):
        wanted = text(0, 1, Case("one process", 1, words), temperature)
        assert pool.run(text, case.world_size, case, temperature) == [wanted] * case.world_size

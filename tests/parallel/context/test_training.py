"""Training on parts of sequences beside the other transforms, and text by a model that is trained so."""

from __future__ import annotations

import functools
from unittest import mock

import pytest
import torch

from paceline.job import resolve
from paceline.model.generate import generate
from paceline.model.transformer import Decoder
from paceline.parallel.compile.apply import compile_blocks
from paceline.parallel.context.apply import whole_sequences
from paceline.parallel.mesh import build_mesh
from paceline.train import startup
from tests.conformance.cases import CONTEXT, Case, resolve_case
from tests.conformance.training import Trained, train
from tests.pool.pool import Pool

STEPS = 5
GATHER = next(case for case in CONTEXT if case.name == "cp-2")
EXCHANGE = next(case for case in CONTEXT if case.name == "cp-2 by all-to-all, with dropout, documents")
METHODS = pytest.mark.parametrize("case", [GATHER, EXCHANGE], ids=["gather", "alltoall"])


def compiled(rank: int, world_size: int, case: Case, steps: int, extra: tuple[str, ...]) -> Trained:
    """As `train`, with blocks traced as for a compiler, and run as they are."""
    backend = functools.partial(compile_blocks, backend="eager")
    with mock.patch.object(startup, "compile_blocks", backend), mock.patch.object(resolve, "check_compiler"):
        return train(rank, world_size, case, steps, (*extra, "parallel.compile=true"))


def alone(case: Case, extra: tuple[str, ...]) -> Trained:
    words = tuple(word for word in case.overrides if word.startswith(("model.", "data.")))
    return train(0, 1, Case("one process", 1, words, case.documents), STEPS, extra)


@METHODS
@pytest.mark.parametrize(
    ("extra", "tolerance"),
    [(("parallel.precision=fp32",), 1e-5), (("parallel.precision=bf16",), 5e-3), (("parallel.loss_chunk_tokens=8",), 1e-9)],
    ids=["fp32", "bf16", "loss in chunks"],
)  # fmt: skip
def test_the_curve_is_that_of_one_process(pool: Pool, case: Case, extra: tuple[str, ...], tolerance: float) -> None:
    """bf16 is held to its own distance from fp32 over 20 steps, as replicas are (tests/conformance)."""
    reference = ("parallel.precision=fp32",) if "parallel.precision=bf16" in extra else extra
    wanted = alone(case, reference)
    for found in pool.run(train, case.world_size, case, STEPS, extra):
        assert found.losses == pytest.approx(wanted.losses, rel=tolerance)


@METHODS
def test_compiled_blocks_attend_over_all_ranks(pool: Pool, case: Case) -> None:
    wanted = alone(case, ())
    for found in pool.run(compiled, case.world_size, case, 2, (), timeout=60.0):
        assert found.losses == pytest.approx(wanted.losses[:2], rel=1e-9)


def text(rank: int, world_size: int, case: Case) -> list[int]:
    resolved = resolve_case(case)
    cpu = torch.device("cpu")
    model, _ = startup.build_model(resolved, build_mesh(resolved.layout, cpu), cpu)
    assert isinstance(model, Decoder)
    with whole_sequences(model):
        return generate(model, [3, 1], 7, vocabulary=resolved.spec.vocab_size, temperature=0.0)


@METHODS
def test_a_sample_is_that_of_one_process(pool: Pool, case: Case) -> None:
    words = tuple(word for word in case.overrides if word.startswith("model."))
    wanted = text(0, 1, Case("one process", 1, words))
    assert pool.run(text, 2, case) == [wanted, wanted]

"""Training in stages beside what the float64 suite does not see: every rank's own gradients and copies, and low precision."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.conformance.cases import Case, made, share, train
from tests.conformance.test_strategies import distance
from tests.pool.pool import Pool

SGD = ("optimizer.name=sgd", "optimizer.momentum=0.9")
TIED = "embedding.weight"
STEPS = 5


def after_steps(
    rank: int, world_size: int, case: Case, steps: int, extra: tuple[str, ...]
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    """This rank's own gradients and weights by name, and the norms of all steps."""
    resolved, _, applied, step = made(rank, world_size, case, extra)
    norms = [step(share(at, rank, resolved, case.documents), 1e-2).grad_norm for at in range(steps)]
    gradients = {n: p.grad.clone() for n, p in applied.parameters if p.grad is not None}
    return gradients, {n: p.detach().clone() for n, p in applied.parameters}, norms


def alone(case: Case, steps: int) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    words = tuple(word for word in case.overrides if word.startswith("model."))
    return after_steps(0, 1, Case("one process", 1, words), steps, SGD)


@pytest.mark.parametrize("microbatch", [3, 2, 1], ids=["2 micro-batches", "3", "6"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_every_stage_reduces_its_gradients_over_data_ranks(pool: Pool, schedule: str, microbatch: int) -> None:
    # BL-07: the last backward of each stage is in another phase of the schedule.
    case = Case("pp-2 dp-2", 4, ("parallel.pp=2", f"parallel.pp_schedule={schedule}", f"batch.microbatch={microbatch}"))
    wanted, _, _ = alone(case, 1)
    found = [gradients for gradients, _, _ in pool.run(after_steps, 4, case, 1, SGD)]
    assert set().union(*found) == set(wanted)
    for name, gradient in wanted.items():
        held = [gradients[name] for gradients in found if name in gradients]
        assert len(held) == 2 and torch.equal(*held)
        assert torch.linalg.vector_norm(held[0] - gradient) < 1e-9 * torch.linalg.vector_norm(gradient)


@pytest.mark.parametrize("ranks", [2, 4], ids=["pp-2", "pp-2 dp-2"])
def test_both_copies_of_a_tied_table_stay_the_same_bits(pool: Pool, ranks: int) -> None:
    # BL-52: their gradients are summed, and the norm counts the table once. Resumed: tests/train/test_resume_elsewhere.py.
    case = Case("tied", ranks, ("parallel.pp=2", "batch.microbatch=2", "model.tie_embeddings=true"))
    _, wanted, norms = alone(case, STEPS)
    found = pool.run(after_steps, ranks, case, STEPS, SGD)
    tables = [weights[TIED] for _, weights, _ in found]
    assert len(tables) == ranks and all(torch.equal(tables[0], table) for table in tables)
    assert torch.linalg.vector_norm(tables[0] - wanted[TIED]) < 1e-9 * torch.linalg.vector_norm(wanted[TIED])
    assert all(own == pytest.approx(norms, rel=1e-9) for _, _, own in found)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 5e-5), ("fp16", 5e-3), ("bf16", 5e-3)])
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_lower_precision_walks_the_curve_of_one_process(
    pool: Pool, schedule: str, precision: str, tolerance: float
) -> None:
    """16 bit is held to what replicas differ from fp32 by (tests/conformance); fp16 with its loss scale."""
    case = Case("pp-2", 2, ("parallel.pp=2", f"parallel.pp_schedule={schedule}", "batch.microbatch=3"))
    wanted = train(0, 1, Case("one process", 1), 12, (*SGD, "parallel.precision=fp32"))
    begin = train(0, 1, Case("one process", 1), 0, (*SGD, "parallel.precision=fp32")).weights
    for found in pool.run(train, 2, case, 12, (*SGD, f"parallel.precision={precision}")):
        assert found.losses == pytest.approx(wanted.losses, rel=tolerance)
        moved = distance(begin, wanted.weights)
        assert distance(found.weights, wanted.weights) < 0.05 * moved


def overflow(rank: int, world_size: int, case: Case) -> list[tuple[str | None, float]]:
    """Steps of which the second has an infinite gradient on the last stage alone: what came of each, and the loss scale."""
    resolved, model, _, step = made(rank, world_size, case, ("parallel.precision=fp16",))
    found = []
    for at in range(4):
        last = next(p for n, p in reversed(list(model.named_parameters())))
        hook = (
            last.register_hook(lambda grad: grad * float("inf"))
            if at == 1 and rank == dist.get_world_size() - 1
            else None
        )
        result = step(share(at, rank, resolved, False), 1e-2)
        if hook is not None:
            hook.remove()
        assert step.loss_scale is not None
        found.append((result.skipped, step.loss_scale.scale))
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_an_overflow_in_one_stage_is_skipped_by_all(pool: Pool, schedule: str) -> None:
    case = Case("pp-2", 2, ("parallel.pp=2", f"parallel.pp_schedule={schedule}", "batch.microbatch=3"))
    first, last = pool.run(overflow, 2, case)
    assert first == last
    assert [skipped is None for skipped, _ in first] == [True, False, True, True]
    assert first[1][1] == first[0][1] / 2 == first[3][1]

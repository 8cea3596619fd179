"""The step's arithmetic under sharding, against sums done by hand and one process. Exact to 1e-6 unless said otherwise."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.data.evaluation import eval_batches
from paceline.optim.config import OptimizerSection
from paceline.train.evaluate import evaluate
from paceline.train.own_module import same_weights
from paceline.train.step import Batch, StepResult
from tests.pool.pool import Pool
from tests.train.test_evaluate import Numbers, value_loss
from tests.train.test_step import Mlp, mlp_data, mlp_forward, reference_mlp, squares
from tests.train.toys import Sharding, Slope, make_sharded_step, tokens

EXACT = 1e-6
SHARDINGS = [
    Sharding(3), Sharding(2), Sharding(1), Sharding(1, every_microbatch=False), Sharding(3, every_microbatch=False),
    Sharding(3, replicas=2), Sharding(1, replicas=2, every_microbatch=False),
]  # fmt: skip


def name(sharding: Sharding) -> str:
    every = "microbatch" if sharding.every_microbatch else "step"
    return f"stage {sharding.stage}, {sharding.replicas} replicas, every {every}"


every_sharding = pytest.mark.parametrize("sharding", SHARDINGS, ids=name)


def slope_step(
    rank: int, world: int, sharding: Sharding, constants: list[list[list[float]]], shape: tuple[int, ...]
) -> tuple[float, StepResult]:
    step, applied = make_sharded_step(Slope(shape=shape), sharding)
    result = step([tokens(*c) for c in constants[rank]], 1.0)
    return float(dict(applied.whole_weights())["w"]), result


@pytest.mark.parametrize("shape", [(1,), ()], ids=["sharded", "whole"])
@every_sharding
def test_sums_divide_by_the_tokens_of_all_ranks_in_every_stage(  # BL-01 BL-03 BL-04 BL-15
    pool: Pool, sharding: Sharding, shape: tuple[int, ...]
) -> None:
    constants = [[[10.0], [3.0]], [[2.0] * 4, [1.0]], [[5.0], [2.0, 2.0]], [[4.0], [6.0]]][: 2 * sharding.replicas]
    flat = [c for ranks in constants for batch in ranks for c in batch]
    mean = sum(flat) / len(flat)
    for weight, result in pool.run(slope_step, len(constants), sharding, constants, shape):
        assert weight == pytest.approx(1 - mean, abs=EXACT)
        assert result.grad_norm == pytest.approx(mean, abs=EXACT) and type(result.grad_norm) is float
        assert result.loss == pytest.approx(mean, abs=EXACT)
        assert result.weight == len(flat)


def train_mlp(rank: int, world: int, sharding: Sharding, accumulation: int) -> tuple[list[Tensor], list[Tensor]]:
    model = Mlp()
    step, applied = make_sharded_step(
        model, sharding, mlp_forward, squares, blocks=[model.first, model.second], prescale=1 / 16, clip_norm=1.0,
        optimizer=OptimizerSection(name="sgd", momentum=0.9, weight_decay=0.01),
    )  # fmt: skip
    for x, y in mlp_data(10, 16):
        own_x, own_y = x.chunk(world)[rank], y.chunk(world)[rank]
        parts = zip(own_x.chunk(accumulation), own_y.chunk(accumulation), strict=True)
        step([{"x": a, "y": b} for a, b in parts], 0.05)
    whole = dict(applied.whole_weights())
    return [whole[n] for n, _ in applied.parameters], [p.detach().clone() for _, p in applied.parameters]


@every_sharding
def test_accumulation_is_neutral_and_replicas_stay_bitwise_equal(pool: Pool, sharding: Sharding) -> None:  # BL-04 BL-05
    expected = reference_mlp(10, 16)
    for accumulation in (1, 4):
        found = pool.run(train_mlp, 2 * sharding.replicas, sharding, accumulation)
        for weights, _ in found:
            for weight, wanted in zip(weights, expected, strict=True):
                torch.testing.assert_close(weight, wanted, rtol=1e-6, atol=1e-7)  # clip's epsilon differs by 1e-6
        for a, b in zip(found[0][1], found[-2][1], strict=True):  # rank 0 and its replica, where there is one
            assert torch.equal(a, b)


class Pair(nn.Module):
    """Two numbers, one on each rank; the gradient of a token is its constants."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2, dtype=torch.float64))


def pair_forward(model: nn.Module, batch: Batch) -> Tensor:
    out: Tensor = model(batch["c"])
    return out


class PairModel(Pair):
    def forward(self, c_2: Tensor) -> Tensor:
        return (c_2 * self.w).sum()


def half_weight(output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    return output, torch.tensor(0.5)


def norm_of_two_shards(rank: int, world: int, stage: Any) -> tuple[StepResult, list[float]]:
    step, applied = make_sharded_step(PairModel(), Sharding(stage), pair_forward, half_weight, clip_norm=1.0)
    constants = torch.tensor([[3.0, 0.0], [0.0, 4.0]][rank], dtype=torch.float64)
    result = step([{"c": constants}], 1.0)
    return result, (1 - dict(applied.whole_weights())["w"]).tolist()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_norm_is_one_number_over_all_shards_and_clips_them_alike(pool: Pool, stage: int) -> None:  # BL-09 BL-11
    for result, moved in pool.run(norm_of_two_shards, 2, stage):
        assert type(result.grad_norm) is float and result.grad_norm == pytest.approx(5.0, abs=EXACT)
        assert moved == pytest.approx([0.6, 0.8], abs=EXACT)


class Linear(nn.Module):
    """A linear layer, with a scale that has no dims and so is left out of the sharding."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2, dtype=torch.float64)
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        with torch.no_grad():
            self.layer.weight.copy_(torch.arange(6.0).view(2, 3))
            self.layer.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) * self.scale
        return out


def linear_step(rank: int, world: int, sharding: Sharding) -> dict[str, Tensor]:
    model = Linear()
    step, applied = make_sharded_step(model, sharding, mlp_forward, squares, prescale=1 / 8, clip_norm=0.5)
    x = torch.arange(24.0, dtype=torch.float64).view(8, 3).chunk(world)[rank] / 10
    step([{"x": x, "y": torch.ones(len(x), 2, dtype=torch.float64)}], 1.0)
    return dict(applied.whole_weights())


def test_only_data_axes_enter_the_scale_and_clipping_takes_mixed_tensors(pool: Pool) -> None:  # BL-12
    model = Linear()
    x = torch.arange(24.0, dtype=torch.float64).view(8, 3) / 10
    (squares(model(x), {"y": torch.ones(8, 2, dtype=torch.float64)})[0] / 8).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    wanted = {n: p.detach() - p.grad for n, p in model.named_parameters() if p.grad is not None}
    for sharding in (Sharding(3), Sharding(1), Sharding(2, replicas=2)):
        for found in pool.run(linear_step, 2 * sharding.replicas, sharding):
            for n, tensor in wanted.items():
                torch.testing.assert_close(found[n], tensor, rtol=EXACT, atol=EXACT)


class Tied(nn.Module):
    """Embedding and head are one parameter, of 8 x 4 numbers."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.embedding = nn.Embedding(8, 4, dtype=torch.float64)
        self.middle = nn.Linear(4, 4, dtype=torch.float64)
        self.head = nn.Linear(4, 8, bias=False, dtype=torch.float64)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.middle(self.embedding(ids))))
        return out


def tied_forward(model: nn.Module, batch: Batch) -> Tensor:
    out: Tensor = model(batch["ids"])
    return out


def tied_loss(output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    return nn.functional.cross_entropy(output, batch["ids"], reduction="sum"), torch.tensor(float(len(output)))


def tied_steps(rank: int, world: int, sharding: Sharding) -> tuple[dict[str, Tensor], bool]:
    model = Tied()
    step, applied = make_sharded_step(model, sharding, tied_forward, tied_loss, blocks=[model.middle], prescale=1 / 8)
    for at in range(5):
        step([{"ids": (torch.arange(8) + at).chunk(world)[rank] % 8}], 0.1)
    with torch.no_grad():
        model(torch.arange(8))
    gathered_alike = model.head.weight is model.embedding.weight
    applied.settle()
    return dict(applied.whole_weights()), gathered_alike and model.head.weight is model.embedding.weight


def test_tied_weights_stay_one_parameter_and_get_both_gradients(pool: Pool) -> None:  # BL-51
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for at in range(5):
        optimizer.zero_grad()
        ids = (torch.arange(8) + at) % 8
        (tied_loss(model(ids), {"ids": ids})[0] / 8).backward()
        optimizer.step()
    for sharding in (Sharding(3), Sharding(1), Sharding(3, replicas=2)):
        for found, tied in pool.run(tied_steps, 2 * sharding.replicas, sharding):
            assert tied
            assert found.keys() == {"embedding.weight", "middle.weight", "middle.bias"}
            for n, parameter in model.named_parameters():
                torch.testing.assert_close(found[n], parameter.detach(), rtol=EXACT, atol=EXACT)


class Buffered(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.randn(4, generator=generator))
        self.register_buffer("table", torch.randn(4, generator=generator), persistent=False)


def buffers_at_start(rank: int, world: int, sharding: Sharding) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = Buffered(rank)
    same_weights(model, dist.group.WORLD)
    _, applied = make_sharded_step(model, sharding)
    return {n: b.clone() for n, b in model.named_buffers()}, dict(applied.whole_weights())


def test_buffers_and_weights_are_equal_on_all_ranks_at_the_start(pool: Pool) -> None:  # BL-66
    for sharding in (Sharding(3), Sharding(2, replicas=2)):
        (first, first_weights), *others = pool.run(buffers_at_start, 2 * sharding.replicas, sharding)
        wanted = Buffered(0)
        assert torch.equal(first["mean"], wanted.mean) and torch.equal(first["table"], wanted.table)
        for buffers, weights in others:
            assert all(torch.equal(buffers[n], first[n]) for n in first)
            assert all(torch.equal(weights[n], first_weights[n]) for n in first_weights)


def frozen_steps(rank: int, world: int) -> tuple[dict[str, Tensor], tuple[int, int]]:
    model = Mlp()
    model.first.requires_grad_(False)
    step, applied = make_sharded_step(
        model, Sharding(3), mlp_forward, squares, blocks=[model.first, model.second], prescale=1 / 16
    )
    for x, y in mlp_data(3, 16):
        step([{"x": x.chunk(world)[rank], "y": y.chunk(world)[rank]}], 0.05)
    return dict(applied.whole_weights()), step.reducer.state_bytes()


def test_frozen_parameters_are_sharded_and_stay(pool: Pool) -> None:
    model = Mlp()
    model.first.requires_grad_(False)
    for x, y in mlp_data(3, 16):
        model.zero_grad()
        (squares(model(x), {"y": y})[0] / 16).backward()
        with torch.no_grad():
            for p in model.second.parameters():
                assert p.grad is not None
                p -= 0.05 * p.grad
    for found, (gradients, _) in pool.run(frozen_steps, 2):
        assert gradients == (2 * 16 + 2) * 8  # half of the second layer
        for n, parameter in model.named_parameters():
            torch.testing.assert_close(found[n], parameter.detach(), rtol=EXACT, atol=EXACT)


class MixedTypes(nn.Module):
    """One unit with two types: the odd one is kept whole."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.ones(4, dtype=torch.float32))

    def forward(self, c: Tensor) -> Tensor:
        return c.sum() * (self.wide.sum() + self.narrow.double().sum())


def mixed_step(rank: int, world: int, sharding: Sharding) -> dict[str, Tensor]:
    step, applied = make_sharded_step(
        MixedTypes(), sharding, pair_forward, lambda output, batch: (output, torch.tensor(1.0))
    )
    step([{"c": torch.tensor([float(rank + 1)])}, {"c": torch.tensor([1.0])}], 1.0)
    return dict(applied.whole_weights())


def test_types_that_a_unit_cannot_mix_are_kept_whole(pool: Pool) -> None:
    for sharding in (Sharding(3), Sharding(1, every_microbatch=False)):
        for found in pool.run(mixed_step, 2, sharding):
            for tensor in found.values():  # gradient (1 + 2 + 1 + 1) over a weight of 4
                torch.testing.assert_close(tensor.double(), torch.full((4,), 1 - 5 / 4, dtype=torch.float64))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.b = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, c: Tensor, branch: str) -> Tensor:
        out: Tensor = c * getattr(self, branch).sum()
        return out


def branch_forward(model: nn.Module, batch: Batch) -> Tensor:
    out: Tensor = model(batch["c"], batch["branch"])
    return out


def use_one_branch(rank: int, world: int, sharding: Sharding) -> dict[str, Tensor]:
    step, applied = make_sharded_step(Branches(), sharding, branch_forward)
    step([{**tokens(3.0), "branch": "ab"[rank]}], 1.0)
    return dict(applied.whole_weights())


def test_parameters_unused_on_one_rank_count_as_zero_there(pool: Pool) -> None:  # BL-68
    for stage in (1, 3):
        for found in pool.run(use_one_branch, 2, Sharding(stage), timeout=30):  # type: ignore[arg-type]
            assert found["a"].tolist() == found["b"].tolist() == pytest.approx([1 - 1.5, 1 - 1.5], abs=EXACT)


class Once(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, dtype=torch.float64)

    def forward(self, values: Tensor) -> Tensor:
        out: Tensor = self.layer(values.view(-1, 1))
        return out


def evaluate_unevenly(rank: int, world: int, size: int, stage: Any) -> tuple[float, float, bool]:
    model = Once()
    _, applied = make_sharded_step(model, Sharding(stage))
    result = evaluate(
        model, lambda model, batch: model(batch["value"]), value_loss,
        eval_batches(Numbers(size), microbatch=2, dp_rank=rank, dp_degree=world, in_step=applied.in_step),
        group=dist.group.WORLD, device=torch.device("cpu"), autocast=nullcontext, wait_for_all=lambda: None,
        settle=applied.settle,
    )  # fmt: skip
    return result.loss, result.weight, all(hasattr(p, "placements") for p in model.parameters())


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_with_fewer_batches_run_as_many_forward_passes(pool: Pool, stage: int) -> None:
    for size in (2, 9):  # a rank without samples, and one with a batch less
        for loss, weight, sharded in pool.run(evaluate_unevenly, 3, size, stage, timeout=20):
            assert (loss, weight) == ((size - 1) / 2, size)
            assert sharded  # nothing is left gathered

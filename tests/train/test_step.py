"""The step's arithmetic against sums done by hand. Values are exact to 1e-6 unless said otherwise."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.optim.config import OptimizerSection
from paceline.parallel.ddp.config import DdpConfig
from paceline.parallel.ddp.cost import CONTROL_VALUES
from paceline.train.step import NO_LABELS, NOT_FINITE, Batch, StepResult
from tests.pool.pool import Pool
from tests.train.toys import Slope, make_step, sum_and_count, tokens

EXACT = 1e-6


def slope_step(rank: int, world: int, per_rank: list[list[list[float]]], lr: float) -> tuple[float, StepResult]:
    model = Slope()
    result = make_step(model)([tokens(*constants) for constants in per_rank[rank]], lr)
    return float(model.w.detach()), result


def test_the_gradient_divides_by_the_tokens_of_all_ranks(pool: Pool) -> None:  # BL-01
    results = pool.run(slope_step, 2, [[[10.0]], [[2.0, 2.0, 2.0, 2.0]]], 1.0)
    for weight, result in results:
        assert weight == pytest.approx(1 - 3.6, abs=EXACT)
        assert result.grad_norm == pytest.approx(3.6, abs=EXACT)


def test_the_logged_loss_is_the_objective_on_every_rank(pool: Pool) -> None:  # BL-15
    results = pool.run(slope_step, 2, [[[10.0]], [[2.0, 2.0, 2.0, 2.0]]], 0.0)
    assert [r.loss for _, r in results] == pytest.approx([3.6, 3.6], abs=EXACT)


def count_tokens(rank: int, world: int, counts: list[list[int]]) -> list[float]:
    step = make_step(Slope())
    return [step([tokens(*[1.0] * n) for n in counts[rank]], 0.0).weight, step([tokens(1.0)], 0.0).weight]


def test_each_window_counts_its_tokens_once(pool: Pool) -> None:  # BL-03
    for first, second in pool.run(count_tokens, 2, [[5, 10], [20, 3]]):
        assert first == 38
        assert second == 2  # the next window starts from nothing


def window_gradient(rank: int, world: int, overlap: bool) -> float:
    model = Slope()
    step = make_step(model, config=DdpConfig(overlap=overlap))
    constants = [[[1.0], [3.0]], [[5.0], [11.0]]][rank]
    step([tokens(*c) for c in constants], 0.0)
    assert model.w.grad is not None
    return float(model.w.grad)


@pytest.mark.parametrize("overlap", [True, False])
def test_only_the_last_micro_batch_reduces_and_all_of_the_window_arrives(pool: Pool, overlap: bool) -> None:  # BL-04
    # (1 + 3 + 5 + 11) / 4 tokens; reducing the first micro-batch instead gives other values on each rank
    assert pool.run(window_gradient, 2, overlap) == pytest.approx([5.0, 5.0], abs=EXACT)


class Mlp(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.first = nn.Linear(6, 16, dtype=dtype)
        self.second = nn.Linear(16, 4, dtype=dtype)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=dtype) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.first(x)))
        return out


def mlp_forward(model: nn.Module, batch: Batch) -> Tensor:
    out: Tensor = model(batch["x"])
    return out


def squares(output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    return (output - batch["y"]).square().sum(), torch.tensor(float(output.shape[0]))


def mlp_data(steps: int, global_batch: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [
        (
            torch.randn(global_batch, 6, generator=generator, dtype=torch.float64),
            torch.randn(global_batch, 4, generator=generator, dtype=torch.float64),
        )
        for _ in range(steps)
    ]


def train_mlp(
    rank: int, world: int, steps: int, global_batch: int, accumulation: int, bucket_bytes: int, optimizer: str = "sgd"
) -> tuple[list[Tensor], int]:
    model = Mlp()
    section = (
        OptimizerSection(name="sgd", momentum=0.9, weight_decay=0.01)
        if optimizer == "sgd"
        else OptimizerSection(name="adamw", weight_decay=0.01)
    )
    step = make_step(model, mlp_forward, squares, optimizer=section, config=DdpConfig(bucket_bytes=bucket_bytes),
                     prescale=1 / global_batch, clip_norm=1.0)  # fmt: skip
    calls = 0
    original = dist.all_reduce

    def counted(tensor: Tensor, *args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += tensor.numel() > CONTROL_VALUES
        return original(tensor, *args, **kwargs)

    dist.all_reduce = counted
    try:
        for x, y in mlp_data(steps, global_batch):
            own_x, own_y = x.chunk(world)[rank], y.chunk(world)[rank]
            parts = zip(own_x.chunk(accumulation), own_y.chunk(accumulation), strict=True)
            step([{"x": a, "y": b} for a, b in parts], 0.05)
    finally:
        dist.all_reduce = original
    return [p.detach().clone() for p in model.parameters()], calls


def reference_mlp(steps: int, global_batch: int) -> list[Tensor]:
    """Plain PyTorch on one process, the loss a mean over the whole batch."""
    model = Mlp()
    optimizer = torch.optim.SGD(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.01},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=0.05,
        momentum=0.9,
    )
    for x, y in mlp_data(steps, global_batch):
        optimizer.zero_grad()
        ((model(x) - y).square().sum() / global_batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(("world", "accumulation"), [(1, 1), (1, 4), (2, 1), (2, 4), (4, 2)])
def test_accumulation_and_ranks_are_neutral_and_reduce_once_per_step(
    pool: Pool, world: int, accumulation: int
) -> None:  # BL-05
    expected = reference_mlp(10, 16)
    for weights, calls in pool.run(train_mlp, world, 10, 16, accumulation, 2**20):
        for found, wanted in zip(weights, expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)  # clip's epsilon differs by 1e-6
        assert calls == (10 if world > 1 else 0)  # one bucket, one reduction per optimizer step


def test_replicas_stay_bitwise_equal_with_many_buckets(pool: Pool) -> None:  # BL-04
    results = pool.run(train_mlp, 3, 5, 12, 2, 64)
    first, calls = results[0]
    assert calls == 5 * 3  # buckets of at least 64 bytes: 4 + 64 numbers, 16, 96
    for weights, _ in results[1:]:
        for a, b in zip(first, weights, strict=True):
            assert torch.equal(a, b)


def mixed_gradients(rank: int, world: int, reduce_bf16: bool) -> float:
    model = Slope(torch.float32)
    step = make_step(model, config=DdpConfig(reduce_bf16=reduce_bf16))
    step([{"c": torch.tensor([256.0 if rank == 0 else 1.0], dtype=torch.bfloat16)}], 0.0)
    assert model.w.grad is not None
    return float(model.w.grad)


def test_gradients_are_reduced_in_fp32_unless_asked(pool: Pool) -> None:  # BL-69
    assert pool.run(mixed_gradients, 4, False) == [64.75] * 4  # 259 / 4 tokens
    rounded = pool.run(mixed_gradients, 4, True)
    assert set(rounded) <= {64.0, 65.0} and len(set(rounded)) == 1


def test_micro_batches_accumulate_in_fp32() -> None:  # BL-69
    model = Slope(torch.float32)
    step = make_step(model)
    step([{"c": torch.tensor([256.0 if k == 0 else 1.0], dtype=torch.bfloat16)} for k in range(9)], 0.0)
    assert model.w.grad is not None
    assert float(model.w.grad) == pytest.approx(264.0 / 9, rel=1e-6)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.b = nn.Parameter(torch.ones((), dtype=torch.float64))


def one_branch(model: nn.Module, batch: Batch) -> Tensor:
    return batch["c"] * getattr(model, batch["branch"])


def use_one_branch(rank: int, world: int) -> tuple[float, float, int]:
    model = Branches()
    step = make_step(model, one_branch)
    step([{**tokens(3.0), "branch": "ab"[rank]}], 1.0)
    return float(model.a.detach()), float(model.b.detach()), len(step.reducer.untouched())


def test_parameters_unused_on_one_rank_count_as_zero_there(pool: Pool) -> None:  # BL-68
    # gradient of each branch: 3 on one rank and 0 on the other, over 2 tokens
    for a, b, untouched in pool.run(use_one_branch, 2, timeout=30):
        assert (a, b) == pytest.approx((1 - 1.5, 1 - 1.5), abs=EXACT)
        assert untouched == 1


def masked_sum(output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    return (output * batch["keep"]).sum(), batch["keep"].sum()


def mask_a_rank(rank: int, world: int, keep: list[list[float]]) -> tuple[float, StepResult]:
    model = Slope()
    step = make_step(model, loss=masked_sum)
    result = step([{**tokens(4.0, 6.0), "keep": torch.tensor(keep[rank], dtype=torch.float64)}], 1.0)
    return float(model.w.detach()), result


def test_a_fully_masked_micro_batch_on_one_rank_steps_on_all(pool: Pool) -> None:  # BL-68
    for weight, result in pool.run(mask_a_rank, 2, [[1.0, 1.0], [0.0, 0.0]], timeout=30):
        assert weight == pytest.approx(1 - 5.0, abs=EXACT)
        assert result.skipped is None


def test_a_window_without_labels_is_skipped_by_all(pool: Pool) -> None:
    for weight, result in pool.run(mask_a_rank, 2, [[0.0, 0.0], [0.0, 0.0]]):
        assert weight == 1.0
        assert result.skipped == NO_LABELS and math.isnan(result.loss)


def poison_one_rank(rank: int, world: int) -> tuple[float, StepResult, int]:
    model = Slope()
    step = make_step(model, optimizer=OptimizerSection(name="adamw"))
    step([tokens(1.0)], 0.1)
    before = float(model.w.detach())
    result = step([tokens(float("inf") if rank == 1 else 1.0)], 0.1)
    return float(model.w.detach()) - before, result, int(next(iter(step.optimizer.state.values()))["step"])


def test_a_bad_step_on_one_rank_is_skipped_by_all(pool: Pool) -> None:
    for moved, result, steps in pool.run(poison_one_rank, 2):
        assert moved == 0.0 and steps == 1
        assert result.skipped == NOT_FINITE


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_clipping_equals_torch(name: str, dtype: torch.dtype) -> None:
    ours, theirs = Mlp(dtype), Mlp(dtype)
    section = OptimizerSection(name=name, weight_decay=0.0)  # type: ignore[arg-type]
    step = make_step(ours, mlp_forward, squares, optimizer=section, prescale=1 / 64, clip_norm=0.1)
    plain = (
        torch.optim.SGD(theirs.parameters())
        if name == "sgd"
        else torch.optim.AdamW(theirs.parameters(), betas=section.betas, eps=section.eps, weight_decay=0.0)
    )
    for x, y in mlp_data(5, 8):
        result = step([{"x": x.to(dtype), "y": y.to(dtype)}], 0.01)
        plain.zero_grad()
        (squares(theirs(x.to(dtype)), {"y": y.to(dtype)})[0] / 8).backward()
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
        for group in plain.param_groups:
            group["lr"] = 0.01
        plain.step()
        assert result.grad_norm == pytest.approx(float(norm), rel=1e-5)
    tolerance = 1e-6 if dtype == torch.float64 else 2e-5  # torch's clip adds 1e-6 to the norm
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_prescale_does_not_change_the_result() -> None:
    for prescale in (1.0, 1 / 4096):
        model = Slope()
        result = make_step(model, loss=sum_and_count, prescale=prescale, clip_norm=2.0)([tokens(3.0, 5.0)], 1.0)
        assert result.grad_norm == pytest.approx(4.0, abs=EXACT)
        assert float(model.w.detach()) == pytest.approx(1 - 2.0, abs=EXACT)

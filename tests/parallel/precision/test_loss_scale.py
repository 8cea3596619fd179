"""fp16's loss scale: agreed by all ranks, halved by an overflow, and a run that goes on."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace

from paceline.errors import JobError
from paceline.optim.config import OptimizerSection
from paceline.optim.optimizer import build_optimizer
from paceline.parallel.config import ParallelSection
from paceline.parallel.ddp.apply import BucketReducer, LocalReducer
from paceline.parallel.ddp.config import DdpConfig
from paceline.parallel.precision.apply import autocast_of, loss_scale_of
from paceline.parallel.precision.config import INITIAL_LOSS_SCALE, check_precision
from paceline.parallel.precision.loss_scale import LossScale
from paceline.train.language import language_functions
from paceline.train.step import NOT_FINITE, OVERFLOW, Batch, TrainStep
from tests.conformance.cases import HOST
from tests.model.models import small_decoder, some_tokens
from tests.pool.pool import Pool
from tests.train.toys import Slope, slope_forward, sum_and_count, tokens

CPU = torch.device("cpu")


def test_the_scale_halves_and_doubles() -> None:
    scale = LossScale(growth_steps=3)
    for _ in range(2):
        scale.succeeded()
    scale.overflowed()
    assert (scale.scale, scale.steps_since_change) == (INITIAL_LOSS_SCALE / 2, 0)
    for _ in range(3):
        scale.succeeded()
    assert scale.scale == INITIAL_LOSS_SCALE
    again = LossScale()
    again.load_state_dict(scale.state_dict())
    assert again.state_dict() == scale.state_dict()


def test_the_scale_has_a_floor() -> None:
    scale = LossScale(scale=2.0)
    scale.overflowed()
    assert scale.scale == 1.0 and scale.at_floor
    scale.overflowed()
    assert scale.scale == 1.0


Walk = tuple[list[str | None], list[float], list[float], float]


def overflow_on_one_rank(rank: int, world: int) -> Walk:
    """The third step's gradient is infinite on rank 1 alone, through a loss that is finite."""
    model = Slope(torch.float32)
    step = TrainStep(
        model, slope_forward, sum_and_count, build_optimizer(OptimizerSection(name="sgd"), model.named_parameters()),
        BucketReducer(model.parameters(), dist.group.WORLD, DdpConfig()), group=dist.group.WORLD, prescale=1.0,
        clip_norm=0.0, device=CPU, loss_scale=LossScale(scale=4.0, growth_steps=100),
    )  # fmt: skip
    blow_up = model.w.register_hook(lambda g: g * math.inf if step_number == 2 and rank == 1 else g)
    skipped, weights, scales = [], [], []
    norm = 0.0
    for step_number in range(5):  # noqa: B007 -- the hook reads it
        result = step([tokens(1.0, 3.0)], 0.1)
        norm = result.grad_norm
        skipped.append(result.skipped)
        weights.append(float(model.w.detach()))
        scales.append(step.loss_scale.scale if step.loss_scale else 0.0)
    blow_up.remove()
    return skipped, weights, scales, norm


def test_an_overflow_skips_on_all_ranks_alike_and_training_goes_on(pool: Pool) -> None:
    for skipped, weights, scales, norm in pool.run(overflow_on_one_rank, 2):
        assert skipped == [None, None, OVERFLOW, None, None]
        assert scales == [4.0, 4.0, 2.0, 2.0, 2.0]
        # The gradient is 2 whatever the scale; the third step changes nothing.
        assert weights == pytest.approx([0.8, 0.6, 0.6, 0.4, 0.2], abs=1e-6)
        assert norm == pytest.approx(2.0)


def bad_step(scale: float, constant: float) -> tuple[str | None, float]:
    model = Slope(torch.float32)
    model.w.register_hook(lambda g: g * math.inf)
    step = TrainStep(
        model, slope_forward, sum_and_count, build_optimizer(OptimizerSection(name="sgd"), model.named_parameters()),
        LocalReducer(model.parameters()), group=None, prescale=1.0, clip_norm=0.0, device=CPU,
        loss_scale=LossScale(scale=scale),
    )  # fmt: skip
    result = step([tokens(constant)], 0.1)
    assert step.loss_scale is not None
    return result.skipped, step.loss_scale.scale


def test_what_the_scale_cannot_mend_is_a_bad_step() -> None:
    assert bad_step(8.0, 1.0) == (OVERFLOW, 4.0)
    assert bad_step(1.0, 1.0) == (NOT_FINITE, 1.0)  # nothing left to lower
    assert bad_step(8.0, math.inf) == (NOT_FINITE, 8.0)  # the loss itself is no number


def losses(rank: int, world: int, precision: str, chunk: int) -> tuple[list[float], list[str | None]]:
    model = small_decoder("llama", torch.float32)
    forward, loss = language_functions(model.spec, 0, chunk_tokens=chunk)
    step = TrainStep(
        model, forward, loss, build_optimizer(OptimizerSection(), model.named_parameters()),
        BucketReducer(model.parameters(), dist.group.WORLD, DdpConfig()), group=dist.group.WORLD, prescale=1 / 96,
        clip_norm=1.0, device=CPU, autocast=autocast_of(precision, CPU), loss_scale=loss_scale_of(precision),
    )  # fmt: skip
    found = []
    for at in range(12):
        batch: Batch = {"tokens": some_tokens(2, 24, seed=at + 100 * rank), "labels": some_tokens(2, 24, seed=at)}
        found.append(step([batch], 3e-3))
    return [r.loss for r in found], [r.skipped for r in found]


@pytest.mark.parametrize("chunk", [0, 10])
def test_fp16_walks_the_curve_of_fp32(pool: Pool, chunk: int) -> None:
    """Measured: 12 steps differ by up to 1e-3 in loss, of which fp16's 11 bits explain 5e-4 a product."""
    wanted, _ = pool.run(losses, 2, "fp32", 0)[0]
    for found, skipped in pool.run(losses, 2, "fp16", chunk):
        assert skipped == [None] * 12
        assert found == pytest.approx(wanted, rel=3e-3)


def test_fp16_is_refused_where_numbers_would_be_converted() -> None:
    section = ParallelSection(precision="fp16")
    check_precision(section, "fp16", HOST)
    with pytest.raises(JobError, match="no fp16 arithmetic") as caught:
        check_precision(section, "fp16", replace(HOST, fp16=False))
    assert caught.value.key == "parallel.precision" and "bf16" in str(caught.value.hint)
    check_precision(section, "bf16", replace(HOST, fp16=False))

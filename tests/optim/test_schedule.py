"""Learning rates against values done by hand."""

from __future__ import annotations

import math

import pytest

from paceline.optim.config import OptimizerSection
from paceline.optim.schedule import batch_factor, describe, learning_rate


def section(**values: object) -> OptimizerSection:
    return OptimizerSection(**{"warmup_steps": 0, "min_lr_ratio": 0.0, **values})  # type: ignore[arg-type]


def test_linear_decay_is_a_function_of_the_step_alone() -> None:  # BL-16
    linear = section(lr=1e-3, schedule="linear")
    assert learning_rate(linear, 25, 100, 24) == pytest.approx(7.5e-4)
    rates = [learning_rate(linear, step, 100, 24) for step in range(100, 121)]
    assert rates == [0.0] * 21


def test_cosine_reaches_its_floor_and_stays() -> None:
    cosine = section(lr=1.0, schedule="cosine", min_lr_ratio=0.1, warmup_steps=10)
    assert [learning_rate(cosine, s, 110, 1) for s in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert learning_rate(cosine, 60, 110, 1) == pytest.approx(0.55)
    assert learning_rate(cosine, 110, 110, 1) == pytest.approx(0.1) == learning_rate(cosine, 500, 110, 1)
    rates = [learning_rate(cosine, s, 110, 1) for s in range(10, 130)]
    assert rates == sorted(rates, reverse=True)


def test_warm_up_stable_decay() -> None:
    wsd = section(lr=1.0, schedule="wsd", warmup_steps=10, decay_steps=20)
    assert learning_rate(wsd, 79, 100, 1) == 1.0
    assert learning_rate(wsd, 90, 100, 1) == pytest.approx(0.5)
    assert learning_rate(wsd, 100, 100, 1) == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("rule", "global_batch", "expected"),
    [("none", 64, 0.1), ("linear", 64, 0.2), ("sqrt", 64, 0.141421), ("linear", 32, 0.1), ("auto", 64, 0.2)],
)
def test_scaling_follows_the_global_batch(rule: str, global_batch: int, expected: float) -> None:  # BL-17
    reference = {} if rule == "none" else {"lr_reference_batch": 32}
    scaled = section(lr=0.1, lr_scaling=rule, schedule="constant", **reference)
    assert learning_rate(scaled, 0, 10, global_batch) == pytest.approx(expected, rel=1e-5)


def test_auto_is_linear_to_1024_sequences_and_a_square_root_beyond() -> None:
    auto = section(lr=1.0, lr_scaling="auto", lr_reference_batch=256)
    assert batch_factor(auto, 1024) == pytest.approx(4.0)
    assert batch_factor(auto, 4096) == pytest.approx(4.0 * math.sqrt(4.0))
    assert "linear to 1024" in describe(auto, 4096)


def test_scaling_without_a_reference_is_refused() -> None:
    with pytest.raises(ValueError, match="needs lr_reference_batch"):
        section(lr_scaling="linear")

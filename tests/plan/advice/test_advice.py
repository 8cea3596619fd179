"""Each rule of advice: when it speaks, when it is silent, and that its numbers are those of the job."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from paceline.plan.advice import advice
from paceline.plan.advice.critical_batch import critical_batch_tokens, expected_loss
from paceline.plan.advice.facts import Facts, facts_of
from paceline.plan.advice.line import Advice
from paceline.plan.search import search
from paceline.plan.weigh import Weighed
from tests.plan.places import cluster, job

BILLION = ("model.preset=llama3.2-1b", "batch.global_batch=256", "data.sequence_length=2048", "run.tokens=2e9")
EIGHT = ("model.preset=llama3-8b", "batch.global_batch=256", "data.sequence_length=4096", "run.tokens=1e11")


def facts(words: tuple[str, ...], text: str) -> Facts:
    task, place = job(*words), cluster(text)
    found = facts_of(search(task, place, shown=1), task, place)
    assert found is not None
    return found


def told(found: Facts) -> dict[str, Advice]:
    return {line.rule: line for line in advice(found)}


@pytest.fixture(scope="module")
def small() -> Facts:
    return facts(BILLION, "1x8xh100-sxm")


@pytest.fixture(scope="module")
def large() -> Facts:
    return facts(EIGHT, "4x8xh100-sxm:ndr400")


def with_step(found: Facts, seconds: float, **parts: float) -> Facts:
    """The facts with another step in the chosen layout."""
    step = msgspec.structs.replace(found.best.step, seconds=seconds, parts=parts)
    best: Weighed = msgspec.structs.replace(found.best, step=step)
    return msgspec.structs.replace(found, best=best)


def test_what_one_device_does_in_two_days_is_not_distributed(small: Facts) -> None:
    line = told(small)["one_device"]
    assert line.says.startswith("Do not distribute") and "LoRA" in line.arithmetic
    assert small.alone is not None and small.alone.choice.layout.world_size == 1
    steps = 2e9 / (256 * 2048)
    assert line.values["seconds_on_one_device"] == pytest.approx(steps * small.alone.seconds, rel=1e-3)
    assert line.values["seconds_on_one_device"] < 2 * 86400
    assert f"{small.best.resolved.steps} steps" in line.arithmetic


def test_a_run_of_a_month_is_distributed(large: Facts) -> None:
    assert large.alone is None, "16 bytes a parameter are more than one device has"
    lines = told(large)
    assert "one_device" not in lines
    # 12 tokens a parameter: it may be fine-tuning, and frozen weights fit.
    assert lines["lora"].values["tokens_per_parameter"] == pytest.approx(1e11 / 8.03e9, rel=1e-3)
    assert "lora" not in told(facts((*EIGHT, "run.tokens=1e12"), "4x8xh100-sxm:ndr400"))


def test_efficiency_under_a_half_says_stop_and_names_what_is_lost(small: Facts, large: Facts) -> None:
    assert "efficiency" not in told(small) and "efficiency" not in told(large)
    assert small.alone is not None
    slow = with_step(small, small.alone.seconds / 3, forward=0.1, bubble=0.2, reduce_exposed=1.0)
    line = told(slow)["efficiency"]
    assert line.values["efficiency"] == pytest.approx(3 / 8) and "37.5%" in line.says
    assert "reduce exposed" in line.says and "faster fabric" in line.says
    waiting = told(with_step(large, 10.0, forward=1.0, backward=2.0, bubble=7.0))["efficiency"]
    assert waiting.values["efficiency"] == pytest.approx(0.3) and "micro-batches" in waiting.says


def test_the_critical_batch_by_the_published_formula(large: Facts) -> None:
    # Kaplan et al. 2020: 2e8 tokens at a loss of 1, and their table's shape: it falls as the loss rises.
    assert critical_batch_tokens(1.0) == pytest.approx(2e8) and critical_batch_tokens(3.0) == pytest.approx(
        1.07e6, rel=0.01
    )
    assert expected_loss(1.5e9, 1e12) == pytest.approx(2.30, abs=0.03)
    assert "critical_batch" not in told(large)
    past = told(facts((*BILLION, "batch.global_batch=16384"), "1x8xh100-sxm"))["critical_batch"]
    batch, critical = 16384 * 2048, past.values["critical_batch_tokens"]
    assert batch > 2 * critical
    steps = [1 + critical / b for b in (batch, batch / 2)]
    assert past.values["steps_saved"] == pytest.approx(1 - steps[0] / steps[1])
    assert f"batch.global_batch={round(critical / 2048)}" in past.says


def test_a_queue_is_weighed_against_what_the_devices_save(small: Facts, large: Facts) -> None:
    line = told(small)["queueing"]
    assert small.alone is not None and small.run_seconds is not None
    steps = small.best.resolved.steps or 0
    assert line.values["break_even_seconds"] == pytest.approx(steps * (small.alone.seconds - small.best.seconds))
    assert told(large)["queueing"].values["fewer_devices"] == 16


def test_a_batch_that_does_not_divide_has_its_nearest_named() -> None:
    odd = told(facts(("batch.global_batch=7",), "1x8xh100-sxm"))["batch_split"]
    assert odd.values["near"] == [8] and odd.values["most_data_ranks"] == 1
    assert told(facts(("batch.global_batch=20",), "1x8xh100-sxm"))["batch_split"].values["near"] == [16, 24]
    assert "batch_split" not in told(facts(("batch.global_batch=16",), "1x8xh100-sxm"))
    assert "batch_split" not in told(facts(("batch.global_batch=4",), "4x8xh100-sxm:ndr400")), "32 is far from 4"


def test_regions_and_the_smoke_test_carry_the_jobs_numbers(small: Facts, large: Facts) -> None:
    assert "regions" not in told(small), "one node is in one region"
    line = told(large)["regions"]
    assert line.values["exchange_seconds"] == pytest.approx(2 * 4 * 8.03e9 / 1.25e9, rel=1e-3)
    assert told(large)["smoke_test"].values["device_hours"] == pytest.approx(32 / 6)
    assert "smoke_test" not in told(facts(BILLION, "1x2xh100-sxm"))


@pytest.mark.parametrize(("words", "takes"), [(BILLION, "one device"), (EIGHT, "one node")])
def test_the_decision_tree_goes_by_size(words: tuple[str, ...], takes: str) -> None:
    assert told(facts(words, "2x8xh100-sxm:ndr400"))["decision_tree"].values["takes"] == takes


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("optimizer.lr=1e-3", "optimizer.lr_reference_batch=64", "optimizer.lr_scaling=sqrt"), "becomes 0.002"),
        (("optimizer.lr=1e-3", "optimizer.lr_reference_batch=64", "optimizer.lr_scaling=linear"), "becomes 0.004"),
        (("batch.global_batch=2048",), "square root"),
    ],
)
def test_another_batch_has_consequences_for_the_learning_rate(words: tuple[str, ...], says: str) -> None:
    assert says in told(facts((*BILLION, *words), "1x8xh100-sxm"))["learning_rate"].says
    assert "learning_rate" not in told(facts(BILLION, "1x8xh100-sxm"))


def test_every_line_has_arithmetic_and_a_source(small: Facts, large: Facts) -> None:
    for line in (*advice(small), *advice(large)):
        record: dict[str, Any] = line.to_record()
        assert any(c.isdigit() for c in record["arithmetic"]) and record["source"] and record["values"], line.rule

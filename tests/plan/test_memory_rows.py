"""What published rows say of memory, by quantity and unit, and what is said of them."""

from __future__ import annotations

import msgspec
import pytest

from paceline.parallel.layout import Layout
from paceline.plan.memory_habits import DEFAULT, Habits, habits_of
from paceline.plan.memory_rows import habits_key, measured_memory, predicted_memory
from paceline.plan.software import software_names
from paceline.units import GiB, MiB
from tests.plan.settings import gpt, setting


@pytest.mark.parametrize(
    ("measured", "source", "expected"),
    [
        ({"memory_gb_as_published": 48}, "bigscience", {"memory_device_bytes": 48 * 1000 * MiB, "fits": 1.0}),
        ({"memory_gb_as_published": 30}, "zerobubble2024", {"memory_allocated_bytes": 30e9, "fits": 1.0}),
        ({"memory_gib": 71.9}, "torchtitan", {"memory_reserved_bytes": 71.9 * GiB, "fits": 1.0}),
        ({"memory_reserved_gib": 2}, "somebody", {"memory_reserved_bytes": 2 * GiB, "fits": 1.0}),
        ({"memory_device_gb": 3}, "somebody", {"memory_device_bytes": 3e9, "fits": 1.0}),
        ({"oom": True}, "bigscience", {"fits": 0.0}),
        ({"memory_gb_as_published": 58.8, "oom_fragmentation": True}, "megatron-bridge",
         {"memory_allocated_bytes": 58.8e9, "fits": 0.0}),
        ({"step_time_s": 3.0}, "vtrain", {"fits": 1.0}),
        ({"memory_gib": "much", "oom": None}, "torchtitan", {}),
        ({}, "vtrain", {}),
    ],
)  # fmt: skip
def test_memory_of_a_row(measured: dict[str, object], source: str, expected: dict[str, float]) -> None:
    assert measured_memory(measured, source) == expected


def test_bigscience_changed_its_optimizer_in_the_middle() -> None:
    row = {"source": "bigscience", "where": "train/tr11-176B-ml/chronicles-prequel.md line 884"}
    assert habits_key(row) == "megatron-deepspeed"
    assert (
        habits_key({**row, "where": "train/tr11-176B-ml/chronicles-prequel.md line 917"}) == "megatron-deepspeed-bf16"
    )
    assert habits_key({**row, "where": "train/tr11-176B-ml/chronicles.md line 45"}) == "megatron-deepspeed-bf16"
    assert habits_key({"source": "vtrain"}) == ""


def test_every_generation_has_habits_of_its_own() -> None:
    plain = habits_of(DEFAULT)
    for key in software_names():
        if key != "paceline":
            assert habits_of(key) != plain, key
            assert isinstance(habits_of(key, "fp8"), Habits)


def test_the_bf16_optimizer_keeps_four_bytes_more_on_every_rank() -> None:
    before, after = habits_of("megatron-deepspeed"), habits_of("megatron-deepspeed-bf16")
    assert after.gradients.size - before.gradients.size == 4
    assert after.gradients.split_from == 2


def test_a_verdict_that_hangs_on_what_is_not_published_is_not_given() -> None:
    note = "recompute none: not published, habit of megatron-2022"
    large = setting(gpt(layers=24, width=4096, heads=32), Layout(tp=8), microbatch=16, accumulation=4, assumed=(note,))
    found = predicted_memory(large)
    assert found.quantities["fits"] is None
    assert found.reason is not None and "recomputation" in found.reason
    assert predicted_memory(msgspec.structs.replace(large, recompute="full", assumed=())).quantities["fits"] == 1.0
    small = msgspec.structs.replace(large, microbatch=1)
    assert predicted_memory(small).quantities["fits"] == 1.0

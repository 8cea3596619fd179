"""Runs of ours are predicted in their own number widths, and on processors with nothing hidden."""

from __future__ import annotations

import msgspec
import pytest

from paceline.cluster.catalogue import device
from paceline.model.spec import parameter_count
from paceline.parallel.layout import Layout
from paceline.plan.exchanges import tensor_seconds
from paceline.plan.setting import Setting, element_bytes
from paceline.plan.software import OWN, generation_on, software
from paceline.plan.step_time import predict_step
from tests.plan.settings import llama, setting


def own(layout: Layout, **changes: object) -> Setting:
    return setting(llama(4), layout, software=OWN, microbatch=4, fused_attention=True, **changes)


@pytest.mark.parametrize(
    ("precision", "dtype", "wanted"),
    [("fp32", "fp32", (4, 4)), ("fp64", "fp32", (8, 8)), ("bf16", "fp32", (2, 4)), ("bf16", "bf16", (2, 2))],
)
def test_widths_are_those_of_the_decoder(precision: str, dtype: str, wanted: tuple[int, int]) -> None:
    assert element_bytes(own(Layout(), precision=precision, parameter_dtype=dtype)) == wanted
    assert element_bytes(setting(precision=precision)) == (2, 2)


def test_tensor_ranks_exchange_twice_the_bytes_in_fp32() -> None:
    layout = Layout(tp=4)
    wide, half = (
        sum(tensor_seconds(own(layout, precision=precision, parameter_dtype=dtype)))
        for precision, dtype in (("fp32", "fp32"), ("bf16", "bf16"))
    )
    assert wide == pytest.approx(2 * half, rel=0.05)


def test_a_processor_hides_no_exchange_behind_its_arithmetic() -> None:
    cpu = device("cpu")
    one, two = (
        predict_step(
            msgspec.structs.replace(own(layout, precision="fp32"), device=cpu, link=cpu.link, devices_per_node=2)
        )
        for layout in (Layout(), Layout(dp_replicate=2))
    )
    assert generation_on(OWN, "cuda") == software(OWN) and not any(
        msgspec.structs.astuple(generation_on(OWN, "cpu").hidden)
    )
    assert one.parts["reduce_exposed"] == 0
    weights = 4 * parameter_count(llama(4))
    assert cpu.link is not None
    assert two.parts["reduce_exposed"] == pytest.approx(weights / cpu.link.reached_bytes_per_second, rel=0.1)

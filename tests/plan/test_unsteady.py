"""A measured machine that is fast and slow by turns: its ranks wait for each other, and its range is wider."""

from __future__ import annotations

import math
import random
import statistics

import msgspec
import pytest

from paceline.cluster.catalogue import device
from paceline.cluster.device import Device
from paceline.parallel.layout import Layout
from paceline.plan.compute import HALF_QUARTILE, unsteadiness
from paceline.plan.setting import Setting
from paceline.plan.software import OWN
from paceline.plan.step_time import PRIOR_SPREAD, predict_step, slowest_of, widened
from tests.plan.settings import llama, setting


def core(sigma: float) -> Device:
    """A core whose products were measured with this deviation."""
    cpu = device("cpu")
    spread = sigma * HALF_QUARTILE
    return msgspec.structs.replace(
        cpu, curves=tuple(msgspec.structs.replace(c, spreads=(spread,) * len(c.sizes)) for c in cpu.curves)
    )


def own(sigma: float, layout: Layout, **changes: object) -> Setting:
    found = setting(llama(2), layout, software=OWN, microbatch=1, fused_attention=True, precision="fp32", **changes)
    cpu = core(sigma)
    return msgspec.structs.replace(found, device=cpu, link=cpu.link, devices_per_node=layout.world_size)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64])
def test_the_slowest_of_ranks_is_that_of_drawn_ones(ranks: int) -> None:
    dice = random.Random(ranks)
    drawn = statistics.fmean(max(dice.gauss(0, 1) for _ in range(ranks)) for _ in range(20_000))
    assert slowest_of(ranks) == pytest.approx(drawn, rel=0.06, abs=0.03)


def test_data_sheets_state_no_unsteadiness() -> None:
    assert unsteadiness(device("h100-sxm"), "bf16") == 0
    assert unsteadiness(core(0.2), "fp32") == pytest.approx(0.2)


def test_ranks_of_an_unsteady_machine_wait_for_the_slowest() -> None:
    for layout, share in ((Layout(), 0.0), (Layout(dp_replicate=2), 0.2 * slowest_of(2))):
        steady, unsteady = (predict_step(own(sigma, layout)) for sigma in (0.0, 0.2))
        arithmetic = steady.parts["forward"] + steady.parts["backward"]
        assert unsteady.seconds - steady.seconds == pytest.approx(share * arithmetic, rel=1e-9, abs=1e-12)


def test_its_range_is_wider() -> None:
    steady, unsteady = (predict_step(own(sigma, Layout())) for sigma in (0.0, 0.2))
    assert (steady.p10 / steady.seconds, steady.p90 / steady.seconds) == pytest.approx(PRIOR_SPREAD)
    assert unsteady.p10 / unsteady.seconds < PRIOR_SPREAD[0] and unsteady.p90 / unsteady.seconds > PRIOR_SPREAD[1]
    low, high = widened((1.0, 1.0), 0.1)
    assert math.log(high) == pytest.approx(-math.log(low)) == pytest.approx(0.128155, rel=1e-5)


def test_shards_of_ours_are_copied_into_and_out_of_what_is_gathered() -> None:
    layout = Layout(dp_shard=2)
    mine = own(0.0, layout, zero_stage=3)
    fast = msgspec.structs.replace(mine, device=msgspec.structs.replace(mine.device, memory_bytes_per_second=1e18))
    took, without = (predict_step(one).detail for one in (mine, fast))
    weights = sum(math.prod(shape) for shape in [(4096, 6144), (4096, 4096), (4096, 3 * 14336)]) * 2
    copied = 2 * 4 * weights * 1.5 / mine.device.memory_bytes_per_second
    assert took["weights_exchange"] - without["weights_exchange"] == pytest.approx(2 * copied, rel=0.01)
    assert took["gradients_exchange"] - without["gradients_exchange"] == pytest.approx(copied, rel=0.01)

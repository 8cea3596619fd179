"""Gradients that are summed once a step, and after every micro-batch."""

from __future__ import annotations

import msgspec
import pytest

from paceline.parallel.layout import Layout
from paceline.plan.setting import Setting
from paceline.plan.step_time import predict_step
from tests.plan.settings import setting


def sharded(stage: int, accumulation: int, *, every: bool) -> Setting:
    """Eight ranks on a link so slow that the exchange is most of the step."""
    found = setting(
        layout=Layout(dp_shard=8), zero_stage=stage, accumulation=accumulation, reduce_every_microbatch=every
    )
    assert found.link is not None
    return msgspec.structs.replace(found, link=msgspec.structs.replace(found.link, bytes_per_second=2e9))


@pytest.mark.parametrize("stage", [2, 3])
def test_one_micro_batch_is_summed_once_either_way(stage: int) -> None:
    once, every = (predict_step(sharded(stage, 1, every=every)).seconds for every in (False, True))
    assert once == pytest.approx(every, rel=0.05)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_of_four_micro_batches_one_sum_takes_less_than_four(stage: int) -> None:
    once, every = (predict_step(sharded(stage, 4, every=every)).seconds for every in (False, True))
    none = predict_step(msgspec.structs.replace(sharded(stage, 4, every=False), layout=Layout())).seconds
    assert none < once < every

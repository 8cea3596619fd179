"""Seconds of what each strategy exchanges, from the statements of the strategies themselves (`parallel/<name>/cost.py`).

A strategy states bytes and calls of one block and of what is outside of blocks; here they become seconds on the setting's
links. What hides them is the business of `plan.step_time`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import msgspec

from paceline.model.spec import ModelSpec
from paceline.optim.config import OptimizerSection
from paceline.parallel.context.config import ContextConfig
from paceline.parallel.context.cost import exchange as context_exchange
from paceline.parallel.ddp.config import DdpConfig
from paceline.parallel.ddp.cost import cost as ddp_cost
from paceline.parallel.fsdp.config import REPLICA_AXIS, FsdpConfig
from paceline.parallel.fsdp.cost import cost as fsdp_cost
from paceline.parallel.layout import SHARDS, Layout
from paceline.parallel.strategy import Collective, ParameterSize, Work
from paceline.parallel.tensor.config import TensorConfig
from paceline.parallel.tensor.cost import exchange as tensor_exchange
from paceline.plan.network import Group, group_of, seconds
from paceline.plan.setting import Setting, element_bytes
from paceline.plan.software import OWN, Software

OPTIMIZER = OptimizerSection()
"""The strategies' statements ask for one; what travels does not depend on it."""

ALWAYS = 0.1
"""Other systems run all of a block's exchanges anew; ours leaves out the last one where the model drops nothing."""


class Both(NamedTuple):
    """Seconds in the forward and in the backward pass of one block and micro-batch; `again`: of recomputation."""

    forward: float
    backward: float
    again: float = 0.0


class DataExchange(NamedTuple):
    """Seconds of the exchange of one unit's weights and gradients between data ranks.

    gather, regather: before its forward and its backward pass. reduce: after its backward pass.
    """

    gather: float
    regather: float
    reduce: float


def tensor_seconds(setting: Setting, factor: float = 1.0) -> Both:
    """What tensor parallelism exchanges for one block and micro-batch."""
    layout = setting.layout
    if layout.tp == 1:
        return Both(0.0, 0.0)
    spec = _one_block(setting.spec, setting.software)
    full = setting.recompute == "full"
    work = Work(
        spec, setting.microbatch, 1, setting.sequence_length, *element_bytes(setting), "full" if full else "none"
    )
    config = TensorConfig(layout.tp, setting.sequence_parallel)
    group = group_of(layout, ("tp",), setting.devices_per_node)
    found = tensor_exchange(work, config, layout.cp, embeds=False, ends=False)
    forward = _sum((c for c in found if c.purpose.endswith("forward")), group, setting, factor)
    again = _sum((c for c in found if "recomputed" in c.purpose), group, setting, factor)
    whole = _sum(found, group, setting, factor)
    return Both(forward, whole - forward - again, again * setting.recomputed_layers)


def context_seconds(setting: Setting, factor: float = 1.0) -> Both:
    """What context parallelism exchanges for one block and micro-batch. A ring sends the keys and values of a gather,
    and in its backward pass them and their gradients."""
    layout = setting.layout
    if layout.cp == 1:
        return Both(0.0, 0.0)
    spec = _one_block(setting.spec, setting.software)
    work = Work(spec, setting.microbatch, 1, setting.sequence_length, *element_bytes(setting))
    config = ContextConfig(method="alltoall" if setting.context_method == "alltoall" else "gather")
    group = group_of(layout, ("cp",), setting.devices_per_node)
    found = context_exchange(work, layout, config)
    forward = _sum(found[:1], group, setting, factor)
    again = forward * setting.recomputed_layers if setting.recompute == "full" else 0.0
    return Both(forward, _sum(found[1:], group, setting, factor), again)


def data_seconds(elements: float, setting: Setting, generation: Software, factor: float = 1.0) -> DataExchange:
    """What data ranks exchange for so many weights of a rank, gathered and reduced as one unit.

    Our engine (`fully_shard`) copies its shard into the buffer that is gathered and every weight out of it, and gradients
    likewise: each a read and a write.
    """
    layout = setting.layout
    gradient_bytes = setting.gradient_bytes or generation.gradient_bytes
    weight_bytes = element_bytes(setting)[0] if setting.software == OWN else generation.weight_bytes
    found = _data_collectives(int(elements), layout, setting.zero_stage, weight_bytes, gradient_bytes)
    shards = group_of(layout, SHARDS, setting.devices_per_node)
    replicas = group_of(layout, ("dp_replicate",), setting.devices_per_node)
    if layout.dp_shard == 1 and layout.cp > 1:
        replicas = Group(layout.dp_replicate * layout.cp, group_of(layout, SHARDS, setting.devices_per_node).per_node)
    if generation.one_card and shards.nodes > 1:
        shards = shards._replace(per_node=1)
    gather = regather = reduce = 0.0
    for collective in found:
        group = replicas if collective.axis == REPLICA_AXIS or collective.kind == "all_reduce" else shards
        took = seconds(collective, group, setting, factor)
        if collective.kind == "all_gather":
            gather, regather = (took, regather) if collective.overlaps == "forward" else (gather, took)
        else:
            reduce += took
    if setting.software == OWN and shards.ranks > 1 and setting.zero_stage >= 1:
        copied = 2 * elements * (1 + 1 / shards.ranks) / setting.device.memory_bytes_per_second
        gather, regather = (took + copied * weight_bytes if took else 0.0 for took in (gather, regather))
        reduce += copied * gradient_bytes
    return DataExchange(gather, regather, reduce)


@lru_cache(maxsize=4096)
def _data_collectives(
    elements: int, layout: Layout, zero_stage: int, weight_bytes: int, gradient_bytes: int
) -> tuple[Collective, ...]:
    if layout.dp_shard == 1 or zero_stage == 0:
        whole = (ParameterSize("unit", elements, gradient_bytes, rows=elements, unit=0),)
        return ddp_cost(whole, 0, layout, DdpConfig()).collectives
    unit = (ParameterSize("unit", elements, weight_bytes, rows=elements, unit=0),)
    config = FsdpConfig(zero_stage=zero_stage)  # type: ignore[arg-type]
    found = [c for c in fsdp_cost(unit, OPTIMIZER, layout, config, 1).collectives if c.size_bytes]
    width = gradient_bytes / weight_bytes
    return tuple(
        c if c.kind == "all_gather" else msgspec.structs.replace(c, size_bytes=int(c.size_bytes * width)) for c in found
    )


@lru_cache(maxsize=1024)
def _one_block(spec: ModelSpec, software: str) -> ModelSpec:
    dropout = spec.dropout if software == OWN else ALWAYS
    return msgspec.structs.replace(spec, num_layers=1, dropout=dropout, attention_dropout=0.0)


def _sum(collectives: Iterable[Collective], group: Group, setting: Setting, factor: float) -> float:
    return sum(seconds(c, group, setting, factor) for c in collectives)

"""What would make a setting fit: each change that frees memory, in the order of what it costs. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from paceline.parallel.pipeline.config import SPLIT_BACKWARD
from paceline.parallel.tensor.config import degrees_that_work
from paceline.plan.device_memory import predict_memory
from paceline.plan.setting import DeviceMemory, Setting
from paceline.plan.verdict import fits
from paceline.units import format_bytes

CHUNK_TOKENS = 1024
"""Tokens of a chunk of the loss: enough for its product to be as fast as a whole one."""


class Change(msgspec.Struct, frozen=True):
    """One change, the memory of the setting with it, and what it costs, in words."""

    change: str
    cost: str
    freed_bytes: int
    fits: bool
    setting: Setting


def changes(setting: Setting, memory: DeviceMemory | None = None) -> list[Change]:
    """Changes that free memory of the heaviest stage, the one with the least cost first."""
    before = predict_memory(setting) if memory is None else memory
    found = []
    for words, cost, fields in _candidates(setting):
        changed = msgspec.structs.replace(setting, **fields)
        after = predict_memory(changed)
        freed = before.device_bytes - after.device_bytes
        if freed > 0:
            found.append(Change(words, cost, freed, fits(after), changed))
    return found


def words_of_changes(setting: Setting) -> list[str]:
    """Each change in a sentence, those that make it fit first; nothing where it fits as it is."""
    memory = predict_memory(setting)
    if fits(memory):
        return []
    found = sorted(changes(setting, memory), key=lambda change: not change.fits)
    return [describe_change(change) for change in found] or [describe_change(None)]


def cheapest(setting: Setting, memory: DeviceMemory | None = None) -> Change | None:
    """The change with the least cost that makes it fit; where none does alone, the one that frees most."""
    found = changes(setting, memory)
    enough = [change for change in found if change.fits]
    if enough:
        return enough[0]
    return max(found, key=lambda change: change.freed_bytes, default=None)


def describe_change(change: Change | None) -> str:
    """One sentence."""
    if change is None:
        return "No single change frees memory: take a smaller model, more devices, or devices with more memory."
    result = "which makes it fit" if change.fits else "which alone is not enough"
    return f"{change.change} frees {format_bytes(change.freed_bytes)}, {result}; {change.cost}."


def _candidates(setting: Setting) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Changes with their costs, the cheapest kind first."""
    tokens = setting.microbatch * setting.sequence_length // setting.layout.cp
    if not setting.loss_chunk_tokens and tokens > CHUNK_TOKENS:
        yield (
            f"A loss in chunks of {CHUNK_TOKENS} tokens", "the result stays the same and so does the speed",
            {"loss_chunk_tokens": CHUNK_TOKENS},
        )  # fmt: skip
    yield from _sharding(setting)
    if setting.microbatch > 1:
        smaller = max(d for d in range(1, setting.microbatch) if setting.microbatch % d == 0)
        more = setting.accumulation * setting.microbatch // smaller
        yield (
            f"microbatch {smaller} instead of {setting.microbatch}", "the result stays the same, products get smaller",
            {"microbatch": smaller, "accumulation": more},
        )  # fmt: skip
    yield from _more_tensor(setting)
    if setting.layout.pp > 1 and setting.schedule in SPLIT_BACKWARD:
        # A backward pass in two parts would compute blocks anew in each.
        return
    if setting.recompute == "none":
        yield "Selective recomputation", "some of the forward is done twice", {"recompute": "selective"}
    if setting.recompute != "full":
        yield "Full recomputation", "a third more arithmetic", {"recompute": "full", "recomputed_layers": 1.0}


def _sharding(setting: Setting) -> Iterator[tuple[str, str, dict[str, Any]]]:
    layout = setting.layout
    if layout.dp_replicate > 1:
        whole = msgspec.structs.replace(layout, dp_replicate=1, dp_shard=layout.dp)
        stage = setting.zero_stage or 1
        yield (
            f"State split over all {layout.dp} data ranks", "replicas exchange the same bytes",
            {"layout": whole, "zero_stage": stage},
        )  # fmt: skip
    if layout.pp == 1 and layout.dp > 1 and setting.zero_stage < 3:
        sharded = msgspec.structs.replace(layout, dp_replicate=1, dp_shard=layout.dp)
        yield (
            "zero_stage 3", "weights are gathered for each pass: half as many bytes again over the network",
            {"layout": sharded, "zero_stage": 3, "reduce_every_microbatch": True},
        )  # fmt: skip


def _more_tensor(setting: Setting) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Twice the degree of tp inside a node, at the cost of data ranks."""
    layout, degree = setting.layout, 2 * setting.layout.tp
    axis = next((axis for axis in ("dp_shard", "dp_replicate") if getattr(layout, axis) % 2 == 0), None)
    if axis is None or degree > setting.devices_per_node or degree not in degrees_that_work(setting.spec):
        return
    halved = msgspec.structs.replace(layout, tp=degree, **{axis: getattr(layout, axis) // 2})
    positions = setting.sequence_length % (layout.cp * degree) == 0
    yield (
        f"tp {degree} instead of {layout.tp}", "every product is split finer and each block waits for exchanges",
        {"layout": halved, "accumulation": 2 * setting.accumulation, "sequence_parallel": positions},
    )  # fmt: skip

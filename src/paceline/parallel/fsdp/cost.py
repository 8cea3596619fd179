"""What sharded data parallelism keeps and sends; derivations in docs/math/fsdp-cost.md. Pure arithmetic.

A unit is what is gathered and reduced together: each block, and the root (all that is outside of blocks). Every tensor
is cut along its first dim into `dp_shard` parts of equal length, the last ones padded; what travels is padded, and so
is what is stored. With K micro-batches, U units of which B are blocks, and T units with trainable parameters, a step runs

    zero_stage   all-gathers     reduce-scatters, every microbatch / every step
    3            K (U + B)       K T / T      (the root is wanted again at once and stays gathered between its passes)
    2            K U             K T / T
    1            U               K T / T

torch's own prefetch adds one all-gather per step where micro-batches are marked as not the last and the root has no
parameters: the first block then prefetches the unit that ended the forward pass before, the last block instead of the
root that is still gathered. `apply.py` leaves the mark away in that case.

Gloo: a reduce-scatter puts the bytes of an all-reduce on the wire, twice what is counted here less one part; and no
collective overlaps anything, since torch issues them on streams that a CPU does not have.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from paceline.optim.config import OptimizerSection
from paceline.optim.cost import moments_bytes
from paceline.parallel.ddp.config import DEFAULT_BUCKET_BYTES
from paceline.parallel.ddp.cost import partition
from paceline.parallel.fsdp.config import REPLICA_AXIS, FsdpConfig
from paceline.parallel.layout import SHARDS, TOKENS, Layout, axes_name
from paceline.parallel.strategy import Collective, Cost, ParameterSize, StateBytes, total_bytes


class Unit(msgspec.Struct, frozen=True):
    """Padded elements of one unit: all of a rank's part, and of its trainable tensors alone."""

    block: bool
    part: int
    trainable_part: int
    gathered_width: int
    reduced_width: int
    kept_width: int


def shardable(parameters: Sequence[ParameterSize]) -> tuple[list[ParameterSize], list[ParameterSize]]:
    """What is split, and what every rank keeps whole: tensors without dims, or of another type than their unit's first."""
    first: dict[int | None, int] = {}
    split: list[ParameterSize] = []
    whole: list[ParameterSize] = []
    for p in parameters:
        if p.rows and p.element_bytes == first.setdefault(p.unit, p.element_bytes):
            split.append(p)
        else:
            whole.append(p)
    return split, whole


def padded_part(parameter: ParameterSize, parts: int) -> int:
    """Elements of the longest part of a tensor that is cut into `parts` along its first dim."""
    return -(-parameter.rows // parts) * (parameter.elements // parameter.rows)


def own_part(parameter: ParameterSize, parts: int, rank: int) -> int:
    """Elements of a rank's part; the last ranks may have less than the others, or none."""
    longest = -(-parameter.rows // parts)
    rows = max(0, min(longest, parameter.rows - rank * longest))
    return rows * (parameter.elements // parameter.rows)


def units_of(parameters: Sequence[ParameterSize], parts: int, config: FsdpConfig) -> list[Unit]:
    """The units in the order of their first parameters."""
    members: dict[int | None, list[ParameterSize]] = {}
    for p in parameters:
        members.setdefault(p.unit, []).append(p)
    units = []
    for number, group in members.items():
        own = group[0].element_bytes
        block = number is not None
        gathered = 2 if config.gather_dtype and block and own == 4 else own
        reduced = 2 if config.reduce_bf16 else own
        units.append(
            Unit(
                block=block,
                part=sum(padded_part(p, parts) for p in group),
                trainable_part=sum(padded_part(p, parts) for p in group if p.trainable),
                gathered_width=gathered,
                reduced_width=reduced,
                kept_width=own,
            )
        )
    return units


def cost(
    parameters: Sequence[ParameterSize],
    optimizer: OptimizerSection,
    layout: Layout,
    config: FsdpConfig,
    accumulation: int,
    shard_rank: int = 0,
) -> Cost:
    """State and collectives of one optimizer step on a rank of the shard axis; rank 0 keeps most.

    `buffers` are the padding of parts and, at the peak, the whole gradient and the reduction buffer of one unit.
    """
    split, whole = shardable(parameters)
    units = units_of(split, layout.shards, config)
    keeps_whole = accumulation > 1 and not config.reduce_every_microbatch
    at_rest = _at_rest(split, whole, optimizer, layout.shards, shard_rank)
    in_window = at_rest
    if accumulation > 1:
        in_window = _in_window(split, whole, units, at_rest, layout.shards, shard_rank, config)
    state = msgspec.structs.replace(
        in_window,
        gathered=_gathered_peak(units, layout.shards, config),
        buffers=in_window.buffers + _reduction_peak(units, layout.shards, keeps_whole),
    )
    collectives = (
        *_gathers(units, layout, config, accumulation),
        *_reductions(units, layout, config, accumulation),
        *_replicated(whole, layout),
    )
    return Cost(state, tuple(c for c in collectives if c.count), at_rest, in_window)


def _at_rest(
    split: Sequence[ParameterSize], whole: Sequence[ParameterSize], optimizer: OptimizerSection, parts: int, rank: int
) -> StateBytes:
    own = [(p, own_part(p, parts, rank)) for p in split] + [(p, p.elements) for p in whole]
    trained = [(p, elements) for p, elements in own if p.trainable]
    return StateBytes(
        parameters=sum(elements * p.element_bytes for p, elements in own),
        gradients=sum(elements * p.element_bytes for p, elements in trained),
        moments=sum(moments_bytes(optimizer, elements, 1, p.element_bytes) for p, elements in trained),
        buffers=_padding(split, parts, rank) + _padding([p for p in split if p.trainable], parts, rank),
    )


def _in_window(
    split: Sequence[ParameterSize],
    whole: Sequence[ParameterSize],
    units: Sequence[Unit],
    at_rest: StateBytes,
    parts: int,
    rank: int,
    config: FsdpConfig,
) -> StateBytes:
    """Between two micro-batches: stage 1 keeps its weights gathered, and gradients are in parts or whole."""
    gathered = sum(u.part * parts * u.gathered_width for u in units) if config.zero_stage == 1 else 0
    if config.reduce_every_microbatch:
        return msgspec.structs.replace(at_rest, gathered=gathered)
    gradients = sum(p.size_bytes for p in (*split, *whole) if p.trainable)
    return msgspec.structs.replace(
        at_rest, gathered=gathered, gradients=gradients, buffers=_padding(split, parts, rank)
    )


def _padding(split: Sequence[ParameterSize], parts: int, rank: int) -> int:
    return sum((padded_part(p, parts) - own_part(p, parts, rank)) * p.element_bytes for p in split)


def _gathered_peak(units: Sequence[Unit], parts: int, config: FsdpConfig) -> int:
    """Whole weights at once: all units and the buffer of the largest, or the root and two blocks under stage 3.

    A unit's weights are gathered into a buffer and copied out of it; under stage 3 the buffer of the next block to be
    gathered stands beside the block in use.
    """
    sizes = [(u.block, u.part * parts * u.gathered_width) for u in units]
    blocks = [size for block, size in sizes if block]
    if config.zero_stage == 3 and blocks:
        return sum(size for block, size in sizes if not block) + 2 * max(blocks)
    return sum(size for _, size in sizes) + max((size for _, size in sizes), default=0)


def _reduction_peak(units: Sequence[Unit], parts: int, keeps_whole: bool) -> int:
    """A unit's whole gradient (unless it is counted as kept) and its reduction buffer, beside the root's gradient."""
    root = sum(0 if keeps_whole else u.trainable_part * parts * u.kept_width for u in units if not u.block)
    peaks = [
        u.trainable_part * parts * (u.reduced_width + (0 if keeps_whole else u.gathered_width if u.block else 0))
        for u in units
    ]
    return root + max(peaks, default=0)


def _gathers(units: Sequence[Unit], layout: Layout, config: FsdpConfig, accumulation: int) -> tuple[Collective, ...]:
    sizes = [(u.block, u.part * layout.shards * u.gathered_width) for u in units]
    times = 1 if config.zero_stage == 1 else accumulation
    gathers = [
        Collective(
            kind="all_gather", axis=axes_name(layout, SHARDS), count=times * len(sizes),
            size_bytes=times * sum(size for _, size in sizes), overlaps="forward", purpose="weights, forward",
        )
    ]  # fmt: skip
    blocks = [size for block, size in sizes if block]
    if config.zero_stage == 3 and blocks:
        gathers.append(
            Collective(
                kind="all_gather", axis=axes_name(layout, SHARDS), count=times * len(blocks), size_bytes=times * sum(blocks),
                overlaps="backward", purpose="weights, backward",
            )
        )  # fmt: skip
    return tuple(gathers)


def _reductions(units: Sequence[Unit], layout: Layout, config: FsdpConfig, accumulation: int) -> tuple[Collective, ...]:
    trained = [u for u in units if u.trainable_part]
    times = accumulation if config.reduce_every_microbatch else 1
    parts = [u.trainable_part * u.reduced_width for u in trained]
    scatters = Collective(
        kind="reduce_scatter", axis=axes_name(layout, SHARDS), count=times * len(parts),
        size_bytes=times * sum(parts) * layout.shards, overlaps="backward", purpose="gradients",
    )  # fmt: skip
    if layout.dp_replicate == 1:
        return (scatters,)
    # Sums of bf16 parts over micro-batches are taken in the shards' own type, which needs them reduced each time.
    times = times if config.reduce_bf16 else 1
    between = Collective(
        kind="all_reduce", axis=REPLICA_AXIS, count=times * len(parts), size_bytes=times * sum(parts),
        overlaps="backward", purpose="gradients, between replicas",
    )  # fmt: skip
    return (scatters, between)


def _replicated(whole: Sequence[ParameterSize], layout: Layout) -> tuple[Collective, ...]:
    """What is kept whole is reduced in buckets over all data ranks, once a step."""
    trained = [p for p in whole if p.trainable]
    count = len(partition(trained, DEFAULT_BUCKET_BYTES))
    return (
        Collective("all_reduce", axes_name(layout, TOKENS), count, total_bytes(trained), "backward", "whole gradients"),
    )

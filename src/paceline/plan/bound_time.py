"""Seconds that a step takes at the least, for very many choices at once.

A micro-batch's seconds in one block and in the head, and the exchanges inside a block that nothing hides, are those of
the prediction itself: they depend on few of a choice's values, and so are predicted once for each combination of them.
Stages are taken to be as even as they go, transfers between them to be free, exchanges between data ranks to have no
latency. The last two are where a bound lies below the prediction. Imports no torch, and numpy only when it is asked.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import msgspec

from paceline.model.flop import Recompute
from paceline.parallel.layout import Layout
from paceline.plan.bound_memory import column
from paceline.plan.compute import Pass, Rates, block_pass, head_pass
from paceline.plan.exchanges import context_seconds, tensor_seconds
from paceline.plan.setting import Setting
from paceline.plan.software import generation_on
from paceline.plan.space import Style
from paceline.plan.step_time import CONTENTION, NO_FACTORS, STRAGGLING, block_weights, outer_weights

ROUNDING = 1 - 1e-9
"""Sums of the bound and of the prediction are taken in another order."""


class Piece(NamedTuple):
    """Seconds of one micro-batch: of a block with its exchanges and without them, what of it makes gradients of weights,
    what of it is a backward pass; of the head, all of it and its gradients of weights."""

    block: float
    block_compute: float
    block_weight: float
    block_backward: float
    head: float
    head_weight: float


def beside(share: float) -> float:
    """What an exchange costs at the least of which a share may run beside arithmetic, which it slows meanwhile."""
    return 1 - share * (1 - CONTENTION)


class Exchanged(NamedTuple):
    """Arrays over the choices of a group: micro-batches, seconds of a block's backward pass, weights of a block and
    outside of blocks, seconds to gather and to reduce one of them. `single`: without a pipeline."""

    np: Any
    single: bool
    count: Any
    backward: Any
    unit: Any
    outer: Any
    gather: Any
    reduce: Any


class TimeBound:
    """Step times of the choices of one job. `setting` is any of its settings, for all that no choice changes."""

    def __init__(self, setting: Setting, split_sequence: bool | None, reduce_every: str) -> None:
        self.setting, self.split, self.every = setting, split_sequence, reduce_every
        self.generation = generation_on(setting.software, setting.device.kind)
        self.rates = Rates(setting.device, self.generation, NO_FACTORS)
        self._pieces: dict[tuple[int, int, int, Recompute], Piece] = {}
        self._blocks: dict[tuple[int, int, int], Pass] = {}
        self._heads: dict[tuple[int, int, int], Pass] = {}

    def seconds(
        self, layouts: list[Layout], ways: list[Style], counts: dict[int, int], again: list[Recompute], wanted: Any
    ) -> Any:
        """Array over (layout, style, micro-batch, recomputation); 0 where it is not `wanted`.

        Args:
            layouts: of equal `pp`.
            counts: micro-batches of a step by the size of one.
            wanted: array over (layout, micro-batch, recomputation).
        """
        import numpy as np

        pieces = np.zeros((len(layouts), 1, len(counts), len(again), len(Piece._fields)))
        sizes = list(counts)
        for i, j, k in np.argwhere(wanted):
            pieces[i, 0, j, k] = self.piece(layouts[i], sizes[j], again[k])
        block, compute, block_weight, backward, head, head_weight = (pieces[..., n] for n in range(len(Piece._fields)))
        count = np.array(list(counts.values()), dtype=float)[None, None, :, None]
        layers, pp = self.setting.spec.num_layers, layouts[0].pp
        whole = layers * block + head
        slowest = np.maximum(np.maximum(whole / pp, math.ceil(layers / pp) * block), head + block)
        # 1F1B: on the slowest stage, whose own first forwards fill some of its wait, or on the last, which has a block
        # and the head at least.
        early = np.maximum(0.0, whole - slowest - (pp - 1) * (math.ceil(layers / pp) * (block - backward) + head))
        late = (count - 1) * (head + block) + whole - count * slowest
        idle = np.stack([
            np.broadcast_to(
                np.maximum(early, late) if way.schedule == "1f1b"
                else self._idle(np, way, pp, whole, slowest, (layers * block_weight + head_weight) / pp), whole.shape
            )[:, 0] for way in ways
        ], axis=1)  # fmt: skip
        together = count * slowest + idle
        left = self._data(np, layouts, ways, count, backward) + self._update(np, layouts, ways)
        behind = self._straggling(layouts[0].world_size) * count * (layers * compute + head) / pp
        return (together + left + behind + self.generation.step_seconds) * ROUNDING

    def piece(self, layout: Layout, microbatch: int, recompute: Recompute) -> Piece:
        """The seconds of a micro-batch under the values that they depend on."""
        key = (layout.tp, layout.cp, microbatch, recompute)
        if key not in self._pieces:
            one = self._one(layout, microbatch, recompute)
            block, head = self._block(one), self._head(one)
            hidden = self.generation.hidden
            exposed = max(0.0, sum(tensor_seconds(one)) * (1 - hidden.tensor) - block.idle) if layout.tp > 1 else 0.0
            exposed += sum(context_seconds(one)) * beside(hidden.context) if layout.cp > 1 else 0.0
            self._pieces[key] = Piece(
                block.forward + block.backward + exposed, block.forward + block.backward,
                block.weight_gradient, block.backward,
                head.forward + head.backward, head.weight_gradient,
            )  # fmt: skip
        return self._pieces[key]

    def _one(self, layout: Layout, microbatch: int, recompute: Recompute) -> Setting:
        s = self.setting
        divides = layout.tp > 1 and s.sequence_length % (layout.cp * layout.tp) == 0
        # Stage 3 gathers weights as they are multiplied, and so narrows none: no stage takes less.
        return msgspec.structs.replace(
            s, layout=Layout(cp=layout.cp, tp=layout.tp), microbatch=microbatch, accumulation=1 << 20,
            recompute=recompute, zero_stage=3,
            sequence_parallel=divides if self.split is None else self.split and layout.tp > 1,
        )  # fmt: skip

    def _block(self, one: Setting) -> Pass:
        """A block's pass; without recomputation it is any other one that computes nothing again."""
        key = (one.layout.tp, one.layout.cp, one.microbatch)
        if one.recompute != "none" or key not in self._blocks:
            self._blocks[key] = block_pass(one, self.rates)
        known = self._blocks[key]
        return known._replace(again=0.0) if one.recompute == "none" else known

    def _head(self, one: Setting) -> Pass:
        key = (one.layout.tp, one.layout.cp, one.microbatch)
        if key not in self._heads:
            self._heads[key] = head_pass(one, self.rates)
        return self._heads[key]

    def _straggling(self, ranks: int) -> float:
        """Share of its arithmetic that a step waits for the slowest rank."""
        return STRAGGLING * math.log2(ranks)

    def _idle(self, np: Any, way: Style, ranks: int, whole: Any, slowest: Any, weights: Any) -> Any:
        """Seconds in which the slowest stage waits while the pipeline fills and drains."""
        if way.schedule in ("zero-bubble", "zbv"):
            mean = whole / ranks
            wait = np.maximum(0.1 * mean, mean - 2 * weights)
            return (ranks - 1) * wait * (1.0 if way.schedule == "zero-bubble" else 0.5)
        return (whole - slowest) / way.stages_per_rank

    def _data(self, np: Any, layouts: list[Layout], ways: list[Style], count: Any, backward: Any) -> Any:
        """Seconds of the exchange between data ranks that no arithmetic can hide."""
        s, hidden = self.setting, self.generation.hidden
        if s.fits:
            # What was measured of a collective bounds it by no bandwidth; such clusters are small.
            return np.zeros((len(layouts), len(ways), 1, 1))
        unit, outer = self._weights(np, layouts)
        blocks = math.floor(s.spec.num_layers / layouts[0].pp)
        tp, shards = column(np, [x.tp for x in layouts]), column(np, [x.shards for x in layouts])
        replicas = column(np, [x.replicas for x in layouts])
        gradient = s.gradient_bytes or self.generation.gradient_bytes
        if layouts[0].dp_shard == 1:
            reduce = 2 * (1 - 1 / replicas) * gradient / self._bus(np, tp, replicas)
            # Interleaved stages hide at most as many micro-batches' worth as there are ranks.
            sums = (blocks * unit + outer) * reduce
            eligible = math.ceil(s.spec.num_layers / layouts[0].pp) * backward * layouts[0].pp
            return sums - np.minimum(sums, eligible) * (1 - beside(hidden.gradients))
        stride = tp * shards
        gather = (1 - 1 / shards) * self.generation.weight_bytes / self._bus(np, tp, shards)
        reduce = (1 - 1 / shards) * gradient / self._bus(np, tp, shards)
        replicated = column(np, [x.dp_replicate for x in layouts])
        reduce = reduce + 2 * (1 - 1 / replicated) * gradient / shards / self._bus(np, stride, replicated)
        held = Exchanged(np, layouts[0].pp == 1, count, backward, unit, outer, gather, reduce)
        rows = [self._sharded(held, way, blocks) for way in ways]
        shape = np.broadcast_shapes(*(row.shape for row in rows))
        return np.stack([np.broadcast_to(row, shape)[:, 0] for row in rows], axis=1)

    def _sharded(self, held: Exchanged, way: Style, blocks: int) -> Any:
        """Of shards: what blocks and micro-batches wait for, and what a step waits for once."""
        hidden, np = self.generation.hidden, held.np
        left, summed = beside(hidden.weights), beside(hidden.gradients)
        unit, outer, gather, reduce = held.unit, held.outer, held.gather, held.reduce
        if way.zero_stage >= 2:
            times = 2 if way.zero_stage == 3 else 1
            reduce = reduce * (self.every != "step")
            each = times * unit * gather * left + unit * reduce * summed
            # What is longer than the arithmetic beside it is not hidden at all.
            each = np.maximum(each, unit * (times * gather + reduce) - 1.5 * held.backward)
            return held.count * blocks * each + outer * (gather + held.reduce) + unit * gather
        if self.every == "microbatch" and held.single:
            return held.count * blocks * unit * reduce * summed
        return blocks * unit * (reduce * summed + gather * left)

    def _update(self, np: Any, layouts: list[Layout], ways: list[Style]) -> Any:
        unit, outer = self._weights(np, layouts)
        blocks = math.ceil(self.setting.spec.num_layers / layouts[0].pp)
        least = blocks * unit + (outer if layouts[0].pp == 1 else 0)
        shards = column(np, [x.shards for x in layouts])
        device = self.setting.device
        return 0.9 * least / shards * self.generation.optimizer_bytes / (
            device.memory_bytes_per_second * device.memory_reached
        ) + 0 * column(np, [0] * len(layouts))  # fmt: skip

    def _weights(self, np: Any, layouts: list[Layout]) -> tuple[Any, Any]:
        """Weights of a block and of what is outside of blocks, on a rank."""
        own = {tp: msgspec.structs.replace(self.setting, layout=Layout(tp=tp)) for tp in {x.tp for x in layouts}}
        piped = {tp: msgspec.structs.replace(s, layout=Layout(tp=tp, pp=layouts[0].pp)) for tp, s in own.items()}
        block = column(np, [block_weights(own[x.tp]) for x in layouts])  # type: ignore[misc]
        return block, column(np, [outer_weights(piped[x.tp]) for x in layouts])  # type: ignore[misc]

    def _bus(self, np: Any, stride: Any, degree: Any) -> Any:
        """Bytes/s of a rank's ring over an axis: of the link within a node, beyond it of the network cards of the ring's
        ranks on a node."""
        s = self.setting
        link = math.inf
        if s.link is not None:
            link = max(s.link.reached_bytes_per_second, *s.link.reduces.values(), 0.0)
        if s.fabric is None:
            return link + 0 * stride * degree
        members = np.minimum(degree, np.maximum(1.0, s.devices_per_node // stride))
        across = s.fabric.reached_bytes_per_second * members
        across = np.where(members > 1, np.minimum(across, link), across)
        return np.where(stride * degree <= s.devices_per_node, link, across)

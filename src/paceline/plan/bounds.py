"""What a choice costs at the least, for very many choices at once: seconds of a step and bytes of a rank.

Only what no schedule and no overlap can take away is counted: arithmetic at the best rate of the device's largest
product, the bubble of equal stages without transfers, tensor-parallel and context traffic at the full rate of its link,
the reduction of gradients where it alone outlasts the arithmetic, reading and writing the state once for the update;
state, kept activations of the first rank of a pipeline, logits. A test holds both below the exact figures of thousands
of choices: what a bound excludes, brute force would have excluded. Imports no torch, and numpy only when it is asked.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from paceline.loss.cost import auto_chunk_tokens
from paceline.model.flop import activation_bytes, attention_flop_per_token, block_matmul_parameter_count
from paceline.model.spec import ModelSpec, parameters
from paceline.parallel.layout import Layout
from paceline.parallel.memory import CONTEXT_BYTES, RESERVE_SHARE, loss_peak_bytes
from paceline.parallel.pipeline.rules import takes
from paceline.parallel.precision.config import ELEMENT_BYTES
from paceline.parallel.tensor.config import rank_spec
from paceline.plan.setting import Setting
from paceline.plan.space import Held, Limits, Style, divisors, recomputes, styles

SLACK = 0.9
"""Share of the arithmetic bound that is relied on: the exact prediction interpolates between sizes and rounds."""

UPDATE_BYTES = 28
"""Bytes that AdamW moves for each fp32 parameter: gradient, weight and two moments read, the last three written."""

WEIGHT_BYTES = 4


class Model(msgspec.Struct, frozen=True):
    """A decoder in the figures that bounds need: parameters and forward FLOP per token, of a block and of the ends."""

    layers: int
    block_parameters: int
    embedding_parameters: int
    head_parameters: int
    block_flop: float
    head_flop: float

    @classmethod
    def of(cls, spec: ModelSpec, sequence_length: int) -> Model:
        held = parameters(spec)
        block = sum(math.prod(p.shape) for p in held if p.layer == 0)
        head = sum(math.prod(p.shape) for p in held if p.role == "head")
        ends = sum(math.prod(p.shape) for p in held if p.layer is None)
        attention = attention_flop_per_token(spec, sequence_length, "causal") / spec.num_layers
        return cls(
            spec.num_layers, block, ends - head, head, 2 * block_matmul_parameter_count(spec) + attention,
            2.0 * spec.vocab_size * spec.dim,
        )  # fmt: skip


class Group(msgspec.Struct, frozen=True):
    """Layouts that are run in the same ways: equal stages, equal sequences per data rank. Arrays are over
    (layout, style, micro-batch, recomputation); infinite seconds stand where a schedule does not take the micro-batches."""

    layouts: list[Layout]
    styles: list[Style]
    microbatches: list[int]
    recompute: list[Any]
    seconds: Any
    memory_bytes: Any


class Bounds:
    """Bounds of one job on one cluster; `setting` is any of its settings, for all that no choice changes."""

    def __init__(self, setting: Setting, limits: Limits, held: Held, device_kind: str, optimizer_moments: int) -> None:
        self.setting, self.limits, self.held, self.kind = setting, limits, held, device_kind
        self.model = Model.of(setting.spec, setting.sequence_length)
        self.moments = optimizer_moments
        self.width = ELEMENT_BYTES[setting.precision]
        self.master = 8 if setting.precision == "fp64" else WEIGHT_BYTES
        self.gathered = 2 if setting.precision in ("bf16", "fp16") else self.master
        self._kept: dict[tuple[int, int, str], tuple[float, float, float]] = {}
        self._logits: dict[tuple[int, int, int], float] = {}

    def groups(self, layouts: list[Layout]) -> list[Group]:
        """All choices of the layouts with their bounds."""
        alike: dict[tuple[int, int, bool], list[Layout]] = {}
        for layout in layouts:
            alike.setdefault((layout.pp, layout.dp, layout.dp_shard > 1), []).append(layout)
        found = (self._group(same) for same in alike.values())
        return [group for group in found if group is not None]

    def _group(self, layouts: list[Layout]) -> Group | None:
        import numpy as np

        first = layouts[0]
        per_rank = self.limits.global_batch // first.dp
        held = self.held.microbatch
        sizes = [d for d in divisors(per_rank) if held in (None, d)]
        ways = styles(first, self.limits, self.held)
        again = sorted({r for way in ways for r in recomputes(way, first.pp > 1, self.held)}, key=len)
        if not (sizes and ways and again):
            return None
        fits_schedule = np.array([
            [[self._runs(first, way, per_rank // size, r) for r in again] for size in sizes] for way in ways
        ])  # fmt: skip
        seconds = self._seconds(np, layouts, ways, sizes, again, per_rank)
        memory = self._memory(np, layouts, ways, sizes, again, per_rank)
        return Group(
            layouts, ways, sizes, again, np.where(fits_schedule[None], seconds, np.inf), memory + np.zeros_like(seconds)
        )

    def _runs(self, layout: Layout, way: Style, microbatches: int, recompute: str) -> bool:
        if layout.pp == 1:
            return True
        if recompute not in recomputes(way, True, self.held):
            return False
        return takes(way.schedule, layout.pp, way.stages_per_rank, microbatches)

    def _seconds(
        self, np: Any, layouts: list[Layout], ways: list[Style], sizes: list[int], again: list[str], per_rank: int
    ) -> Any:
        s, model, pp = self.setting, self.model, layouts[0].pp
        tp, cp = _column(np, [x.tp for x in layouts]), _column(np, [x.cp for x in layouts])
        size = np.array(sizes, dtype=float)[None, None, :, None]
        count = per_rank / size
        passes = np.array([4.0 if r == "full" else 3.0 for r in again])[None, None, None, :]
        blocks = np.array([w.stages_per_rank for w in ways], dtype=float)[None, :, None, None]
        tokens = size * s.sequence_length / cp
        mean = (model.layers * passes * model.block_flop + 3 * model.head_flop) / pp
        last = 3 * model.head_flop + (blocks if pp > 1 else model.layers) * passes * model.block_flop
        flop = np.maximum(mean, last) * tokens / tp
        rate = _rates(np, s, 2 * tokens * s.spec.dim * max(s.spec.ffn_dim, s.spec.vocab_size) / tp)
        stream = tokens * s.spec.dim * self.width
        rounds = np.array([1.5 if r == "full" else 1.0 for r in again])[None, None, None, :]
        inner = 8 * stream * (1 - 1 / tp) * rounds / _bus(np, s, 1.0, tp)
        pairs = 2 * tokens * s.spec.num_kv_heads * s.spec.head_dim * self.width / np.minimum(tp, s.spec.num_kv_heads)
        across = 2 * pairs * (cp - 1) / _bus(np, s, tp, cp)
        exchanged = (inner + across) * model.layers / pp
        busy = count * (flop / rate + (0.5 * exchanged if s.nodes * s.devices_per_node > 1 else 0.0))
        share = np.array([_bubble(way, pp) for way in ways])[None, :, None, None] / count
        reduced = self._reduction(np, layouts, ways, count)
        return np.maximum(SLACK * busy * (1 + share), 0.5 * reduced) + self._update(np, layouts)

    def _local(self, np: Any, layouts: list[Layout]) -> Any:
        """Parameters of a rank before sharding: of the rank of a pipeline that holds the least of all."""
        model, pp = self.model, layouts[0].pp
        ends = model.embedding_parameters + model.head_parameters if pp == 1 else 0
        whole = model.layers // pp * model.block_parameters + ends
        return whole / _column(np, [x.tp for x in layouts])

    def _reduction(self, np: Any, layouts: list[Layout], ways: list[Style], count: Any) -> Any:
        local, s = self._local(np, layouts), self.setting
        tp, shards = _column(np, [x.tp for x in layouts]), _column(np, [x.shards for x in layouts])
        replicas = _column(np, [x.replicas for x in layouts])
        if layouts[0].dp_shard == 1:
            return 2 * (1 - 1 / replicas) * self.master * local / _bus(np, s, tp, replicas)
        zero = np.array([w.zero_stage for w in ways])[None, :, None, None]
        gathers = np.where(zero == 3, 2 * count, np.where(zero == 2, count, 1.0))
        scatters = np.where(zero == 1, 1.0, count)
        moved = (gathers * self.gathered + scatters * 2.0) * local * (1 - 1 / shards) / _bus(np, s, tp, shards)
        between = 2 * (1 - 1 / replicas) * 2.0 * local / shards / _bus(np, s, tp * shards, replicas)
        return moved + between

    def _update(self, np: Any, layouts: list[Layout]) -> Any:
        moved = UPDATE_BYTES * self._local(np, layouts) / _column(np, [x.shards for x in layouts])
        return 0.5 * moved / self.setting.device.memory_bytes_per_second

    def _memory(
        self, np: Any, layouts: list[Layout], ways: list[Style], sizes: list[int], again: list[str], per_rank: int
    ) -> Any:
        pp = layouts[0].pp
        count = np.array([per_rank // b for b in sizes], dtype=float)[None, None, :, None]
        state = self._state(np, layouts, ways, count)
        kept = np.array([[self._activations(x, r) for r in again] for x in layouts])[:, None, None, :, :]
        size = np.array(sizes, dtype=float)[None, None, :, None]
        alive = np.array([[_alive(w, pp, per_rank // b) for b in sizes] for w in ways], dtype=float)[None, :, :, None]
        blocks = np.array([self.model.layers // (pp * w.stages_per_rank) for w in ways])[None, :, None, None]
        layers = alive * np.maximum(1, blocks) if pp > 1 else self.model.layers
        tail = np.array([[[self._logits_of(x, b)] for b in sizes] for x in layouts])[:, None] if pp == 1 else 0.0
        grown = kept[..., 0] * size * layers + kept[..., 1] * (size if pp == 1 else 0) + tail
        return state + (1 + RESERVE_SHARE[self.kind]) * grown + CONTEXT_BYTES[self.kind]

    def _state(self, np: Any, layouts: list[Layout], ways: list[Style], count: Any) -> Any:
        local, shards = self._local(np, layouts), _column(np, [x.shards for x in layouts])
        moments = self.moments * local / shards
        if layouts[0].dp_shard == 1:
            return 2 * self.master * local + moments
        zero = np.array([w.zero_stage for w in ways])[None, :, None, None]
        whole = np.where((zero == 1) & (count > 1), 1.0, 1 / shards)
        block = self.model.block_parameters / _column(np, [x.tp for x in layouts])
        gathered = self.gathered * np.where(zero == 3, np.minimum(2 * block, local), local)
        return self.master * local * (1 / shards + whole) + moments + gathered

    def _activations(self, layout: Layout, recompute: Any) -> tuple[float, float]:
        """Bytes that one sequence keeps on a rank: of a block, and outside of all blocks (without pipeline)."""
        key = (layout.tp, layout.cp, recompute)
        if key not in self._kept:
            s = self.setting
            split = s.sequence_length % (layout.cp * layout.tp) == 0 and layout.tp > 1
            found = activation_bytes(
                rank_spec(s.spec, layout.tp), 1, s.sequence_length, self.width, recompute=recompute,
                residual_bytes=self.master, stream_ranks=layout.tp if split else 1, sequence_ranks=layout.cp,
                blocks_in_dtype=True,
            )  # fmt: skip
            self._kept[key] = (float(found.per_layer), float(found.head), 0.0)
        return self._kept[key][:2]

    def _logits_of(self, layout: Layout, microbatch: int) -> float:
        key = (layout.tp, layout.cp, microbatch)
        if key not in self._logits:
            s = self.setting
            spec = rank_spec(s.spec, layout.tp)
            tokens = microbatch * s.sequence_length // layout.cp
            kept = activation_bytes(spec, microbatch, s.sequence_length, self.width, sequence_ranks=layout.cp)
            chunk = auto_chunk_tokens(tokens, s.spec.vocab_size, self.kind)
            whole = loss_peak_bytes(spec, kept, tokens, self.width, 0)
            chunked = loss_peak_bytes(spec, kept, tokens, self.width, chunk or s.loss_chunk_tokens or tokens)
            self._logits[key] = float(min(whole, chunked))
        return self._logits[key]


def _column(np: Any, values: list[int]) -> Any:
    return np.array(values, dtype=float)[:, None, None, None]


def _bubble(way: Style, ranks: int) -> float:
    """Idle time as a multiple of one micro-batch's: of equal stages, with a backward twice as long as the forward."""
    if way.schedule == "zero-bubble":
        return (ranks - 1) / (3 * way.stages_per_rank)
    if way.schedule == "zbv":
        return (ranks - 1) / 6
    return (ranks - 1) / way.stages_per_rank


def _alive(way: Style, ranks: int, microbatches: int) -> int:
    """Passes of a micro-batch through a stage whose activations the first rank of a pipeline keeps at the least."""
    if ranks == 1:
        return 1
    per_rank = way.stages_per_rank
    most = {
        "gpipe": microbatches, "1f1b": ranks, "interleaved-1f1b": (per_rank - 1) * ranks + 2 * (ranks - 1) + 1,
        "zero-bubble": per_rank * ranks, "zbv": 2 * ranks if microbatches >= 2 * ranks else min(ranks, microbatches),
    }[way.schedule]  # fmt: skip
    return min(most, microbatches * per_rank)


def _rates(np: Any, setting: Setting, size_flop: Any) -> Any:
    """FLOP/s of the largest product; never above the peak."""
    device, kind = setting.device, setting.precision
    peak = device.peak.get(kind) or max(device.peak.values())
    curve = next((c for c in device.curves if c.operation == "matmul" and c.dtype == kind), None)
    if curve is None:
        return peak + 0 * size_flop
    # The best rate of all sizes up to this one: a curve may fall again, a bound may not.
    best = np.maximum.accumulate(np.array(curve.rates, dtype=float))
    return np.interp(np.log(size_flop), np.log(np.array(curve.sizes, dtype=float)), best)


def _bus(np: Any, setting: Setting, stride: Any, degree: Any) -> Any:
    """Bytes/s of a rank's ring over an axis: that of the link within a node, beyond it of the node's fabric, shared by the
    groups that leave the node at once."""
    link = math.inf
    if setting.link is not None:
        link = max(setting.link.bytes_per_second, *setting.link.reduces.values(), 0.0)
    fabric = setting.fabric.bytes_per_second if setting.fabric is not None else link
    inside = stride * degree <= setting.devices_per_node
    members = np.maximum(1.0, setting.devices_per_node / stride)
    return np.where(inside, link, np.minimum(link, fabric * members) if math.isfinite(fabric) else link)

"""Bytes that a rank needs at the least, for very many choices at once: state, kept activations of the first rank of a
pipeline, logits. Imports no torch, and numpy only when it is asked."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec

from paceline.loss.cost import auto_chunk_tokens
from paceline.model.flop import ActivationBytes, activation_bytes, block_matmul_parameter_count
from paceline.model.spec import ModelSpec, parameters
from paceline.parallel.config import ParallelSection
from paceline.parallel.layout import Layout
from paceline.parallel.memory import CONTEXT_BYTES, RESERVE_SHARE, loss_peak_bytes
from paceline.parallel.pipeline.config import PipelineConfig
from paceline.parallel.pipeline.rules import rounds
from paceline.parallel.precision.config import ELEMENT_BYTES
from paceline.parallel.recompute.cost import peak_bytes
from paceline.parallel.tensor.config import rank_spec
from paceline.plan.setting import Setting
from paceline.plan.space import Style


class Sizes(msgspec.Struct, frozen=True):
    """Parameters of a decoder: of one block, of all that is outside of blocks, and of its tables at the beginning."""

    layers: int
    block: int
    ends: int
    table: int

    @classmethod
    def of(cls, spec: ModelSpec) -> Sizes:
        held = parameters(spec)
        block = sum(math.prod(p.shape) for p in held if p.layer == 0)
        table = sum(math.prod(p.shape) for p in held if p.role in ("embedding", "position_embedding"))
        return cls(spec.num_layers, block, sum(math.prod(p.shape) for p in held if p.layer is None), table)


class MemoryBound:
    """Memory of the choices of one job.

    Args:
        moments: bytes of the optimizer's moments that stay on a device, per parameter.
        cut: the stages of a number of ranks in a style.
    """

    def __init__(
        self,
        setting: Setting,
        parallel: ParallelSection,
        device_kind: str,
        moments: int,
        cut: Callable[[int, Style], PipelineConfig],
    ) -> None:
        self.cut = cut
        self.setting, self.kind, self.moments = setting, device_kind, moments
        self.sizes = Sizes.of(setting.spec)
        self.width = ELEMENT_BYTES[setting.precision]
        self.weight = 8 if setting.precision == "fp64" else 4
        self.gathered = 2 if setting.precision in ("bf16", "fp16") else self.weight
        self.reduced = 2 if parallel.reduce_dtype == "bf16" else self.weight
        self.residual = 2 if parallel.parameter_dtype == "bf16" else self.weight
        self.split, self.every = parallel.sequence_parallel, parallel.reduce_every
        self._kept: dict[tuple[int, int, int, str, bool], float] = {}
        self._blocks: dict[tuple[int, int, str], float] = {}
        self._passes: dict[tuple[str, int, int, int, int], int] = {}
        self._ranks: dict[tuple[int, int, tuple[int, ...], int], tuple[Any, Any]] = {}
        self._losses: dict[tuple[int, int, int], int] = {}

    def bytes(self, layouts: list[Layout], ways: list[Style], counts: dict[int, int], again: list[Any]) -> Any:
        """Array over (layout, style, micro-batch, recomputation).

        Args:
            layouts: of equal `pp`, all sharded or none.
            counts: micro-batches of a step by the size of one.
        """
        import numpy as np

        pp = layouts[0].pp
        held = Held(np, layouts, ways, counts)
        if pp == 1:
            kept = [[[self._whole(x, b, r) for r in again] for b in counts] for x in layouts]
            grown = np.array(kept)[:, None]
            state = self._state(held, self.sizes.layers, self.sizes.ends)
            return state + (1 + RESERVE_SHARE[self.kind]) * grown + CONTEXT_BYTES[self.kind]
        per_block = np.array([[self._per_block(x, r) for r in again] for x in layouts])[:, None, None, :]
        copies = np.array([[self._copies(x)] for x in layouts])[:, None, None, :]
        size = np.array(list(counts), dtype=float)[None, None, :, None]
        most = 0.0
        for rank in sorted({0, 1, pp - 1}):
            alive, blocks = self._held_by(np, pp, ways, tuple(counts.values()), rank)
            grown = (size * per_block + copies) * alive
            if rank == pp - 1:
                # The last stage of zbv is the first rank's.
                ends = np.array([way.schedule != "zbv" for way in ways])[None, :, None, None]
                grown = grown + ends * np.array([[[self._logits(x, b)] for b in counts] for x in layouts])[:, None]
            kept = self._state(held, blocks, 0 if rank else self.sizes.table)
            most = np.maximum(most, kept + (1 + RESERVE_SHARE[self.kind]) * grown)
        return most + CONTEXT_BYTES[self.kind]

    def _state(self, held: Held, blocks: Any, ends: int) -> Any:
        """Weights, gradients, moments, whole copies and buffers of a rank with so many blocks and so much outside of them."""
        np, own = held.np, self.weight
        block, outer = self.sizes.block / held.tp, ends / held.tp
        local = blocks * block + outer
        if not held.sharded:
            return 2 * own * local + self.moments * local
        first = held.zero == 1
        each = {"auto": ~first, "microbatch": True, "step": False}[self.every] if held.single else False
        keeps = (held.count > 1) & np.logical_not(each)
        gradients = np.where(keeps, local, local / held.shards)
        unit = np.maximum(self.gathered * block, own * outer)
        gathered = np.where(
            held.zero == 3, own * outer + 2 * self.gathered * block, blocks * self.gathered * block + own * outer + unit
        )
        reduced = np.where(keeps, self.reduced * block, (self.reduced + self.gathered) * block)
        buffers = np.where(keeps, 0.0, own * outer) + np.maximum(reduced, self.reduced * outer)
        return (own + self.moments) * local / held.shards + own * gradients + gathered + buffers

    def _held_by(self, np: Any, ranks: int, ways: list[Style], counts: tuple[int, ...], rank: int) -> tuple[Any, Any]:
        """Blocks whose activations a rank of a pipeline keeps, and blocks that it has, as arrays over the choices."""
        key = (ranks, len(ways), counts, rank)
        if key not in self._ranks:
            cuts = [self.cut(ranks, way) for way in ways]
            alive = [[float(self._alive(cut, rank, m)) for m in counts] for cut in cuts]
            blocks = [sum(cut.layers[stage] for stage in cut.stages_of(rank)) for cut in cuts]
            self._ranks[key] = np.array(alive)[None, :, :, None], np.array(blocks)[None, :, None, None]
        return self._ranks[key]

    def _alive(self, cut: PipelineConfig, rank: int, microbatches: int) -> int:
        key = (cut.schedule, cut.ranks, cut.stages_per_rank, rank, microbatches)
        if key not in self._passes:
            self._passes[key] = alive_blocks(cut, rank, microbatches)
        return self._passes[key]

    def _per_block(self, layout: Layout, recompute: Any) -> float:
        """Bytes that one sequence keeps of a block on a rank."""
        key = (layout.tp, layout.cp, recompute)
        if key not in self._blocks:
            self._blocks[key] = float(self._activations(layout, 1, recompute).per_layer)
        return self._blocks[key]

    def _copies(self, layout: Layout) -> float:
        """Bytes of 16-bit copies of a block's weights, which each pass of a micro-batch makes where none are gathered."""
        if layout.dp_shard > 1 or self.width >= self.residual:
            return 0.0
        return self.width * block_matmul_parameter_count(rank_spec(self.setting.spec, layout.tp))

    def _whole(self, layout: Layout, microbatch: int, recompute: Any) -> float:
        """Activations and logits of a micro-batch on a rank without a pipeline, at the peak of a step."""
        key = (layout.tp, layout.cp, microbatch, recompute, layout.dp_shard > 1)
        if key not in self._kept:
            kept = self._activations(layout, microbatch, recompute)
            logits = self._logits(layout, microbatch)
            self._kept[key] = float(peak_bytes(kept, recompute, logits) + logits)
        return self._kept[key]

    def _logits(self, layout: Layout, microbatch: int) -> int:
        """Logits and loss of a micro-batch, whole or in chunks, whichever is less."""
        key = (layout.tp, layout.cp, microbatch)
        if key not in self._losses:
            s = self.setting
            kept = self._activations(layout, microbatch, "none")
            tokens = microbatch * s.sequence_length // layout.cp
            chunk = auto_chunk_tokens(tokens, s.spec.vocab_size, self.kind) or s.loss_chunk_tokens or tokens
            spec = rank_spec(s.spec, layout.tp)
            self._losses[key] = min(loss_peak_bytes(spec, kept, tokens, self.width, size) for size in (0, chunk))
        return self._losses[key]

    def _activations(self, layout: Layout, microbatch: int, recompute: Any) -> ActivationBytes:
        s = self.setting
        split = self.split is not False and layout.tp > 1 and s.sequence_length % (layout.cp * layout.tp) == 0
        return activation_bytes(
            rank_spec(s.spec, layout.tp), microbatch, s.sequence_length, self.width, recompute=recompute,
            residual_bytes=self.residual, stream_ranks=layout.tp if split else 1, sequence_ranks=layout.cp,
            blocks_in_dtype=layout.dp_shard > 1 or layout.pp > 1,
        )  # fmt: skip


class Held:
    """What a group of choices is told apart by, as arrays over (layout, style, micro-batch, recomputation)."""

    def __init__(self, np: Any, layouts: list[Layout], ways: list[Style], counts: dict[int, int]) -> None:
        self.np = np
        self.sharded, self.single = layouts[0].dp_shard > 1, layouts[0].pp == 1
        self.tp = column(np, [x.tp for x in layouts])
        self.shards = column(np, [x.shards for x in layouts])
        self.zero = np.array([w.zero_stage for w in ways])[None, :, None, None]
        self.count = np.array(list(counts.values()), dtype=float)[None, None, :, None]


def column(np: Any, values: list[int]) -> Any:
    """One number a layout, for arrays over (layout, style, micro-batch, recomputation)."""
    return np.array(values, dtype=float)[:, None, None, None]


def alive_blocks(cut: PipelineConfig, rank: int, microbatches: int) -> int:
    """Blocks of all micro-batches that a rank of a pipeline keeps activations of at one moment, when its first passes are
    done and the first backward pass has not given any back: its peak is at least that."""
    stages = cut.stages_of(rank)
    own = [cut.layers[stage] for stage in stages]
    after = cut.ranks - 1 - rank
    if cut.schedule in ("gpipe", "1f1b"):
        return own[0] * (microbatches if cut.schedule == "gpipe" else min(microbatches, after + 1))
    if cut.schedule == "zbv":
        down = min(microbatches, 2 * (after + 1) - 1 + rank)
        return down * own[0] + min(microbatches, rank + 1) * own[1]
    length = microbatches // rounds(microbatches, cut.ranks)
    passes = (len(own) - 1) * length + (after + rank + 1 if cut.splits_backward else 2 * after + 1)
    left, alive, turn = min(passes, microbatches * len(own)), 0, 0
    while left > 0:
        alive += min(left, length) * own[turn % len(own)]
        left, turn = left - length, turn + 1
    return alive

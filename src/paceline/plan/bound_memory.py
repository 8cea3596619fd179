"""Bytes that a rank needs at the least, for very many choices at once: state, kept activations of the first rank of a
pipeline, logits. Imports no torch, and numpy only when it is asked."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from paceline.loss.cost import auto_chunk_tokens
from paceline.model.flop import activation_bytes
from paceline.model.spec import ModelSpec, parameters
from paceline.parallel.layout import Layout
from paceline.parallel.memory import CONTEXT_BYTES, RESERVE_SHARE, loss_peak_bytes
from paceline.parallel.precision.config import ELEMENT_BYTES
from paceline.parallel.tensor.config import rank_spec
from paceline.plan.setting import Setting
from paceline.plan.space import Style


class Sizes(msgspec.Struct, frozen=True):
    """Parameters of a decoder: of one block, and of what is outside of blocks."""

    layers: int
    block: int
    ends: int

    @classmethod
    def of(cls, spec: ModelSpec) -> Sizes:
        held = parameters(spec)
        block = sum(math.prod(p.shape) for p in held if p.layer == 0)
        return cls(spec.num_layers, block, sum(math.prod(p.shape) for p in held if p.layer is None))


class MemoryBound:
    """Memory of the choices of one job. `moments`: bytes of the optimizer's moments that stay on a device, per parameter."""

    def __init__(self, setting: Setting, device_kind: str, moments: int) -> None:
        self.setting, self.kind, self.moments = setting, device_kind, moments
        self.sizes = Sizes.of(setting.spec)
        self.width = ELEMENT_BYTES[setting.precision]
        self.weight = 8 if setting.precision == "fp64" else 4
        self.gathered = 2 if setting.precision in ("bf16", "fp16") else self.weight
        self._kept: dict[tuple[int, int, str], tuple[float, float]] = {}
        self._logits: dict[tuple[int, int, int], float] = {}

    def bytes(self, layouts: list[Layout], ways: list[Style], counts: dict[int, int], again: list[Any]) -> Any:
        """Array over (layout, style, micro-batch, recomputation).

        Args:
            layouts: of equal `pp`.
            counts: micro-batches of a step by the size of one.
        """
        import numpy as np

        pp = layouts[0].pp
        size = np.array(list(counts), dtype=float)[None, None, :, None]
        count = np.array(list(counts.values()), dtype=float)[None, None, :, None]
        state = self._state(np, layouts, ways, count)
        kept = np.array([[self._activations(x, r) for r in again] for x in layouts])[:, None, None, :, :]
        if pp == 1:
            tail = np.array([[[self._logits_of(x, b)] for b in counts] for x in layouts])[:, None]
            grown = size * (kept[..., 0] * self.sizes.layers + kept[..., 1]) + tail
        else:
            alive = np.array([[_alive(w, pp, m) for m in counts.values()] for w in ways], dtype=float)[None, :, :, None]
            blocks = np.array([max(1, self.sizes.layers // (pp * w.stages_per_rank)) for w in ways])[None, :, None, None]
            grown = size * kept[..., 0] * alive * blocks
        return state + (1 + RESERVE_SHARE[self.kind]) * grown + CONTEXT_BYTES[self.kind]

    def local(self, np: Any, layouts: list[Layout]) -> Any:
        """Parameters of a rank before sharding; of a pipeline, of the rank that holds the least."""
        pp = layouts[0].pp
        whole = self.sizes.layers // pp * self.sizes.block + (self.sizes.ends if pp == 1 else 0)
        return whole / column(np, [x.tp for x in layouts])

    def _state(self, np: Any, layouts: list[Layout], ways: list[Style], count: Any) -> Any:
        local, shards = self.local(np, layouts), column(np, [x.shards for x in layouts])
        moments = self.moments * local / shards
        if layouts[0].dp_shard == 1:
            return 2 * self.weight * local + moments
        zero = np.array([w.zero_stage for w in ways])[None, :, None, None]
        whole = np.where((zero == 1) & (count > 1), 1.0, 1 / shards)
        block = self.sizes.block / column(np, [x.tp for x in layouts])
        gathered = self.gathered * np.where(zero == 3, np.minimum(2 * block, local), local)
        return self.weight * local * (1 / shards + whole) + moments + gathered

    def _activations(self, layout: Layout, recompute: Any) -> tuple[float, float]:
        """Bytes that one sequence keeps on a rank: of a block, and outside of all blocks."""
        key = (layout.tp, layout.cp, recompute)
        if key not in self._kept:
            s = self.setting
            split = s.sequence_length % (layout.cp * layout.tp) == 0 and layout.tp > 1
            found = activation_bytes(
                rank_spec(s.spec, layout.tp), 1, s.sequence_length, self.width, recompute=recompute,
                residual_bytes=self.weight, stream_ranks=layout.tp if split else 1, sequence_ranks=layout.cp,
                blocks_in_dtype=True,
            )  # fmt: skip
            self._kept[key] = (float(found.per_layer), float(found.head))
        return self._kept[key]

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


def column(np: Any, values: list[int]) -> Any:
    """One number a layout, for arrays over (layout, style, micro-batch, recomputation)."""
    return np.array(values, dtype=float)[:, None, None, None]


def _alive(way: Style, ranks: int, microbatches: int) -> int:
    """Passes of a micro-batch through a stage whose activations the first rank of a pipeline keeps at the least."""
    per_rank = way.stages_per_rank
    most = {
        "gpipe": microbatches, "1f1b": ranks, "interleaved-1f1b": (per_rank - 1) * ranks + 2 * (ranks - 1) + 1,
        "zero-bubble": per_rank * ranks, "zbv": 2 * ranks if microbatches >= 2 * ranks else min(ranks, microbatches),
    }[way.schedule]  # fmt: skip
    return min(most, microbatches * per_rank)

"""What a choice costs at the least, for very many choices at once: bytes of a rank and seconds of a step.

A test holds both below the exact figures of many choices: what a bound excludes, brute force would have excluded.
Imports no torch, and numpy only when it is asked.
"""

from __future__ import annotations

from typing import Any

import msgspec

from paceline.parallel.layout import Layout
from paceline.parallel.pipeline.rules import takes
from paceline.plan.bound_memory import MemoryBound
from paceline.plan.bound_time import TimeBound
from paceline.plan.space import Held, Limits, Style, divisors, recomputes, styles


class Group(msgspec.Struct, frozen=True):
    """Layouts that are run in the same ways: equal stages, equal sequences per data rank.

    Arrays are over (layout, style, micro-batch, recomputation): `runs`, whether the schedule takes them; `seconds`, 0
    where the memory excludes the choice already.
    """

    layouts: list[Layout]
    styles: list[Style]
    microbatches: list[int]
    recompute: list[Any]
    runs: Any
    seconds: Any
    memory_bytes: Any


class Bounds:
    """Bounds of one job on one cluster."""

    def __init__(self, time: TimeBound, memory: MemoryBound, limits: Limits, held: Held, available_bytes: int) -> None:
        self.time, self.memory, self.limits, self.held = time, memory, limits, held
        self.available = available_bytes
        self._taken: dict[tuple[int, tuple[int, ...], int], Any] = {}

    def groups(self, layouts: list[Layout]) -> list[Group]:
        """All choices of the layouts with their bounds."""
        alike: dict[tuple[int, int, bool], list[Layout]] = {}
        for layout in layouts:
            alike.setdefault((layout.pp, layout.dp, layout.dp_shard > 1), []).append(layout)
        found = (self._group(same) for same in alike.values())
        return [group for group in found if group is not None]

    def _group(self, layouts: list[Layout]) -> Group | None:
        import numpy as np

        first, held = layouts[0], self.held.microbatch
        per_rank = self.limits.global_batch // first.dp
        counts = {size: per_rank // size for size in divisors(per_rank) if held in (None, size)}
        ways = styles(first, self.limits, self.held)
        again = sorted({r for way in ways for r in recomputes(way, first.pp > 1, self.held)}, key=len)
        if not (counts and ways and again):
            return None
        runs = self._runs(np, first.pp, ways, tuple(counts.values()), again)
        memory = self.memory.bytes(layouts, ways, counts, again)
        may = runs[None] & (memory <= self.available)
        seconds = self.time.seconds(layouts, ways, counts, again, may.any(axis=1))
        return Group(
            layouts, ways, list(counts), again, np.broadcast_to(runs[None], memory.shape), np.where(may, seconds, 0.0), memory
        )  # fmt: skip

    def _runs(self, np: Any, ranks: int, ways: list[Style], counts: tuple[int, ...], again: list[Any]) -> Any:
        """Array over (style, micro-batch, recomputation): what the schedules take."""
        key = (ranks, counts, ways[0].zero_stage)
        if key not in self._taken:
            takes_counts = [
                [ranks == 1 or takes(way.schedule, ranks, way.stages_per_rank, m) for m in counts] for way in ways
            ]
            recomputed = [[r in recomputes(way, ranks > 1, self.held) for r in again] for way in ways]
            self._taken[key] = np.array(takes_counts)[:, :, None] & np.array(recomputed)[:, None, :]
        return self._taken[key]

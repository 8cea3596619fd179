"""A run on a fleet, played from failure to failure: every device, node and spare by itself. No torch.

It shares no formula with `plan/failures.py`, which it agrees with. Where repairs or failures are not as the formulas assume
(a fixed repair time, another interval, few spares), this is what to ask.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from paceline.checkpoint.interval import SaveCost
from paceline.errors import UsageError
from paceline.plan.failures import Fleet
from paceline.units import format_percent, format_seconds

DAY = 86400.0
REPEATS = 10
"""Runs with other dice, whose spread is the standard error."""

Repair = Literal["exponential", "fixed"]
Kind = Literal["device", "node", "job", "notice"]


class Simulated(msgspec.Struct, frozen=True, kw_only=True):
    """One run of `days`: its seconds by what became of them, which add up, and what happened.

    kept: progress. saving, redone, recovering, waiting: as in `plan.failures.Outlook`.
    """

    days: float
    seed: int
    kept: float
    saving: float
    redone: float
    recovering: float
    waiting: float
    failures: dict[str, int]
    waits: int
    saves: int

    @property
    def goodput(self) -> float:
        return self.kept / (self.days * DAY)


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """Mean shares of several simulated runs, each with the standard error of the mean."""

    days: float
    repeats: int
    shares: dict[str, float]
    errors: dict[str, float]
    failures: float
    waits: float

    @property
    def goodput(self) -> float:
        return self.shares["goodput"]

    def to_record(self) -> dict[str, Any]:
        return msgspec.structs.asdict(self)

    def describe(self) -> str:
        return (
            f"simulated {self.days:g} days, {self.repeats} times: goodput {format_percent(self.goodput)} "
            f"+- {self.errors['goodput'] * 100:.2f}%, {self.failures:.0f} failures, {self.waits:.1f} waits for a node"
        )


class _Spent:
    """Seconds by what became of them."""

    def __init__(self) -> None:
        self.kept = self.saving = self.redone = self.recovering = self.waiting = 0.0
        self.saves = 0


class _Clocks:
    """When each part fails next, in seconds of running time: a standing job wears nothing out.

    A node that comes in place of another brings clocks of its own; what the other one would have done is skipped by its
    generation. Only what fails before the end is kept.
    """

    def __init__(self, fleet: Fleet, dice: random.Random, end: float) -> None:
        self._fleet = fleet
        self._dice = dice
        self._end = end
        self._generation = [0] * fleet.nodes
        self._heap: list[tuple[float, Kind, int, int]] = []
        for slot in range(fleet.nodes):
            self._add(slot, 0.0)
        self._push("job", -1, 0, 0.0, fleet.job_rate)
        heapq.heapify(self._heap)

    def next(self) -> tuple[float, Kind, int]:
        """The next failure: running time, what failed, the node's place; at infinity when none comes before the end."""
        while self._heap:
            at, kind, slot, generation = heapq.heappop(self._heap)
            if kind == "job":
                self._push(kind, slot, 0, at, self._fleet.job_rate, ordered=True)
                return at, kind, slot
            if generation == self._generation[slot]:
                return at, kind, slot
        return math.inf, "job", -1

    def replace(self, slot: int, now: float) -> None:
        """Another node takes the place."""
        self._generation[slot] += 1
        self._add(slot, now, ordered=True)

    def _add(self, slot: int, now: float, ordered: bool = False) -> None:
        fleet, generation = self._fleet, self._generation[slot]
        here = min(fleet.devices_per_node, fleet.devices - slot * fleet.devices_per_node)
        for _ in range(here):
            self._push("device", slot, generation, now, fleet.device_rate, ordered)
        self._push("node", slot, generation, now, fleet.node_rate, ordered)
        self._push("notice", slot, generation, now, fleet.notice_rate, ordered)

    def _push(self, kind: Kind, slot: int, generation: int, now: float, rate: float, ordered: bool = False) -> None:
        if rate <= 0:
            return
        at = now + self._dice.expovariate(rate)
        if at >= self._end:
            return
        if ordered:
            heapq.heappush(self._heap, (at, kind, slot, generation))
        else:
            self._heap.append((at, kind, slot, generation))


def simulate(
    fleet: Fleet,
    save: SaveCost,
    *,
    interval_seconds: float,
    recovery_seconds: float,
    days: float,
    seed: int = 0,
    repair: Repair = "exponential",
) -> Simulated:
    """Play one run; the same seed gives the same run.

    Args:
        fleet: what runs, how it fails, what stands by.
        save: what a save costs.
        interval_seconds: training between two saves; not shorter than a save is in flight.
        recovery_seconds: from a failure, or from the arrival of a node, until training goes on; also at the start.
        days: to play.
        repair: whether a repair takes its mean, or is drawn from an exponential distribution with that mean.

    Raises:
        UsageError: there is nothing to play, or saves would overlap.
    """
    if days <= 0 or interval_seconds <= 0:
        raise UsageError(
            f"{days:g} days with a save every {interval_seconds:g} s: both must be above 0", values={"days": days}
        )
    if interval_seconds < save.write_seconds:
        raise UsageError(
            f"a save every {format_seconds(interval_seconds)} that takes {format_seconds(save.write_seconds)} to be durable "
            "overlaps with the next",
            values={"interval_seconds": interval_seconds, "write_seconds": save.write_seconds},
            hint="Save less often.",
        )
    dice, end = random.Random(seed), days * DAY
    clocks, spent = _Clocks(fleet, dice, end), _Spent()
    failures = dict.fromkeys(("device", "node", "job", "notice"), 0)
    now = waited = 0.0
    waits, ready = 0, fleet.spares
    away: list[float] = []
    while True:
        at, kind, slot = clocks.next()
        failed = min(at + waited, end)
        _live(failed - now, save, interval_seconds, recovery_seconds, spent, keeps=kind == "notice" or failed == end)
        now = failed
        if failed == end:
            break
        failures[kind] += 1
        if kind == "job":
            continue
        while away and away[0] <= now:
            heapq.heappop(away)
            ready += 1
        mean = fleet.repair_seconds
        heapq.heappush(away, now + (mean if repair == "fixed" or mean == 0 else dice.expovariate(1 / mean)))
        if ready:
            ready -= 1
        else:
            back = min(heapq.heappop(away), end)
            waits += 1
            waited += back - now
            spent.waiting += back - now
            now = back
        clocks.replace(slot, at)
        if now == end:
            break
    return Simulated(
        days=days, seed=seed, kept=spent.kept, saving=spent.saving, redone=spent.redone, recovering=spent.recovering,
        waiting=spent.waiting, failures=failures, waits=waits, saves=spent.saves,
    )  # fmt: skip


def _live(
    seconds: float, save: SaveCost, interval_seconds: float, recovery_seconds: float, spent: _Spent, *, keeps: bool
) -> None:
    """What becomes of the time from one failure to the next, walked from save to save.

    A save stands still for its stall; then training goes on more slowly until it is durable, and only then counts.
    keeps: nothing is lost at the end of it.
    """
    if seconds <= recovery_seconds:
        spent.recovering += seconds
        return
    spent.recovering += recovery_seconds
    stall = max(0.0, save.stall_seconds)
    slow = max(0.0, save.write_seconds - stall)
    gone = min(1.0, max(0.0, save.slowdown))
    left, made, durable, requested, writing = seconds - recovery_seconds, 0.0, 0.0, 0.0, 0.0
    while True:
        # `interval_seconds` of progress, the first of them slower while the last save is still written.
        needed = interval_seconds + gone * writing
        if left < needed:
            if left >= writing:
                durable = requested
            made += left - gone * min(left, writing)
            break
        durable = requested
        left -= needed
        made += interval_seconds
        if left < stall:
            break
        left -= stall
        spent.saves += 1
        requested, writing = made, slow
        if slow == 0:
            durable = requested
    kept = made if keeps else durable
    spent.kept += kept
    spent.redone += made - kept
    spent.saving += seconds - recovery_seconds - made


def estimate(
    fleet: Fleet,
    save: SaveCost,
    *,
    interval_seconds: float,
    recovery_seconds: float,
    days: float,
    seed: int = 0,
    repeats: int = REPEATS,
    repair: Repair = "exponential",
) -> Estimate:
    """Several runs with different dice; see `simulate`."""
    runs = [
        simulate(
            fleet, save, interval_seconds=interval_seconds, recovery_seconds=recovery_seconds, days=days,
            seed=seed + k, repair=repair,
        )
        for k in range(repeats)
    ]  # fmt: skip
    shares, errors = {}, {}
    for name, values in _shares(runs):
        mean = math.fsum(values) / repeats
        spread = math.fsum((v - mean) ** 2 for v in values) / max(1, repeats - 1)
        shares[name], errors[name] = mean, math.sqrt(spread / repeats)
    return Estimate(
        days=days, repeats=repeats, shares=shares, errors=errors,
        failures=sum(sum(run.failures.values()) for run in runs) / repeats,
        waits=sum(run.waits for run in runs) / repeats,
    )  # fmt: skip


def _shares(runs: list[Simulated]) -> Iterator[tuple[str, list[float]]]:
    for name, field in (("goodput", "kept"), *((n, n) for n in ("saving", "redone", "recovering", "waiting"))):
        yield name, [getattr(run, field) / (run.days * DAY) for run in runs]

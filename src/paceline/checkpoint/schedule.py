"""When a save is due; rank 0 asks after each step. No torch, no clock of its own."""

from __future__ import annotations

import statistics

from paceline.checkpoint.config import AUTO, CheckpointSection
from paceline.checkpoint.interval import FIRST_SECONDS, RECOVERY_SECONDS, Interval, SaveCost, best_interval
from paceline.units import format_percent, format_seconds

REMEMBERED = 5
"""Saves whose median cost decides the interval."""

TOLD_CHANGE = 1.25
"""Ratio by which an interval changes before it is told again."""

TOLD_REGRET = 0.01
"""Share of the time that a user's own interval loses before that is told."""


class Schedule:
    """Saves every so many steps or seconds, or as their cost and the failure rate say; the last step is the caller's.

    A save that comes due while one is in flight is made when that one is done; what comes due meanwhile is one save with it.

    Args:
        every: steps, seconds as a float, `"auto"` or `"end"`.
        now: seconds of any clock that only rises; also in the methods.
        ranks: of the run.
        failures_per_second: of the run as a whole; that of published runs unless given.
        recovery_seconds: from a failure until training goes on.

    Attributes:
        interval: the best one, as far as it is known; None before a save was measured.
        requested, skipped: saves that came due, and those of them that became one with another.
    """

    def __init__(
        self,
        every: int | float | str,
        *,
        now: float,
        ranks: int = 1,
        failures_per_second: float | None = None,
        recovery_seconds: float = RECOVERY_SECONDS,
    ) -> None:
        self.interval: Interval | None = None
        self.requested = 0
        self.skipped = 0
        self._steps = every if isinstance(every, int) else None
        self._auto = every == AUTO
        self._seconds = FIRST_SECONDS if self._auto else float(every) if isinstance(every, float) else None
        self._since = now
        self._waiting = False
        self._ranks = ranks
        self._failures_per_second = failures_per_second
        self._recovery_seconds = recovery_seconds
        self._costs: list[SaveCost] = []
        self._measured = 0
        self._saved_at: float | None = None
        self._gap: float | None = None
        self._told: float | None = None

    @classmethod
    def of(
        cls,
        section: CheckpointSection,
        *,
        now: float,
        ranks: int,
        failures_per_second: float | None = None,
        recovery_seconds: float = RECOVERY_SECONDS,
    ) -> Schedule:
        """The schedule of `checkpoint.every`."""
        seconds = section.every_seconds
        every = section.every if seconds is None else seconds
        return cls(
            every, now=now, ranks=ranks, failures_per_second=failures_per_second, recovery_seconds=recovery_seconds
        )

    def due(self, step: int, now: float, *, busy: bool = False) -> bool:
        """Whether to save now, after `step`; never while a save is in flight (`busy`). Call it once a step."""
        if self._comes_due(step, now):
            self.requested += 1
            self.skipped += self._waiting
            self._waiting = True
        return self._waiting and not busy

    def saved(self, now: float) -> None:
        """A save began, whether it was due or somebody asked for it."""
        self._waiting = False
        self._gap = None if self._saved_at is None else now - self._saved_at
        self._since = self._saved_at = now

    def ended(self) -> None:
        """The last step's save is made; one that was still to be made is that one."""
        self.skipped += self._waiting
        self._waiting = False

    def measured(self, cost: SaveCost) -> str | None:
        """Take in what a save cost; returns a sentence where it is news for the user.

        That is a new interval of `"auto"`, or what an interval of the user's own loses beside the best one. The first
        save of a process also starts the writer and allocates its buffer: it counts only until there is a second.
        """
        if self._measured == 1:
            self._costs.clear()
        self._measured += 1
        self._costs = [*self._costs, cost][-REMEMBERED:]
        self.interval = best_interval(
            self._median(), self._ranks, failures_per_second=self._failures_per_second,
            recovery_seconds=self._recovery_seconds,
        )  # fmt: skip
        if not self._auto:
            return self._own(self.interval)
        self._seconds = self.interval.seconds
        if self._told is not None and 1 / TOLD_CHANGE < self._seconds / self._told < TOLD_CHANGE:
            return None
        self._told = self._seconds
        return f"checkpoint.every = auto: {self.interval.explain()}"

    def _own(self, best: Interval) -> str | None:
        """What the user's own interval loses, told once, from the second save on and where it is much."""
        if self._told is not None or self._gap is None or best.regret(self._gap) < TOLD_REGRET:
            return None
        self._told = self._gap
        return (
            f"checkpoint.every: a save every {format_seconds(self._gap)} loses {format_percent(best.regret(self._gap))} of "
            f"the time beside auto, which takes {best.explain()}"
        )

    def _median(self) -> SaveCost:
        return SaveCost(
            *(
                statistics.median(getattr(cost, field) for cost in self._costs)
                for field in ("stall_seconds", "slowdown", "write_seconds")
            )
        )

    def _comes_due(self, step: int, now: float) -> bool:
        if self._steps is not None:
            return step % self._steps == 0
        if self._seconds is None or now - self._since < self._seconds:
            return False
        self._since = now
        return True

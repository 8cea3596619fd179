"""What follows when an attempt has ended: another one, after how long, or the end. A state machine without processes.

It counts within one command. Only a new step renews the budget of restarts: what fails again and again at the same place
would fail for ever, and a run that gets on is not ended for failing often. Derived in docs/guide/recovery.md.
"""

from __future__ import annotations

from typing import NamedTuple

from paceline.errors import (
    DiskFull,
    Interrupted,
    JobError,
    NoCheckpoint,
    NoProgress,
    PacelineError,
    Preempted,
    RunHeld,
    Stalled,
    UsageError,
)

NEVER_RETRIED = frozenset(
    kind.exit_code
    for kind in (UsageError, RunHeld, Preempted, NoCheckpoint, JobError, DiskFull, NoProgress, Interrupted)
)
"""Exit codes that a second attempt would only repeat, or that somebody asked for."""

LONGEST_BACKOFF_SECONDS = 60.0
IDLE_ATTEMPTS = 3
"""Attempts without a new step that end a run, and times that one failure may come at one step."""


class Attempt(NamedTuple):
    """How an attempt ended.

    error: what it came to; None where all is done.
    signature: tells a failure that comes again from another one; None where nothing can be concluded from it, as from a
        signal that came from outside.
    start: optimizer steps that were done when it began to step; None where it did not come so far.
    reached: optimizer steps that were done at its end.
    agreed: every rank raised the same error of ours: what they found would be found again.
    told_to_stop: this command was told to stop while the attempt ran.
    traceback: what is printed for the error, if anything.
    """

    error: PacelineError | None
    signature: str | None = None
    start: int | None = None
    reached: int = 0
    agreed: bool = False
    told_to_stop: bool = False
    traceback: str | None = None

    @property
    def stepped(self) -> bool:
        """Whether it did one step at least, be it one that an earlier attempt had done."""
        return self.start is not None and self.reached > self.start


class Restart(NamedTuple):
    """Start the workers anew after `delay_seconds`. `again`: for a failure that has been told before."""

    delay_seconds: float
    reason: str
    again: bool = False


class End(NamedTuple):
    """The run ends with `error` (None: it is done). `traceback` is that of the first failure of those that ended it."""

    error: PacelineError | None
    traceback: str | None = None


class Supervision:
    """The policy of one command: how often a run starts again, and when that is given up.

    Args:
        max_restarts: without a new step in between.
        backoff_seconds: before the second of them; doubles.
        restart_stalled: whether a stall is a failure like another; else it ends the run.

    Attributes:
        attempts: those that have ended.
    """

    def __init__(self, max_restarts: int = 3, backoff_seconds: float = 1.0, *, restart_stalled: bool = True) -> None:
        self.attempts = 0
        self._max_restarts = max_restarts
        self._backoff_seconds = backoff_seconds
        self._restart_stalled = restart_stalled
        self._furthest = 0
        self._series: list[Attempt] = []
        """Failed attempts since the last new step, the one that made it first."""
        self._idle = 0

    def after(self, attempt: Attempt) -> Restart | End:
        """What follows `attempt`."""
        self.attempts += 1
        error = attempt.error
        if error is None:
            return End(None)
        self._count(attempt)
        if self._is_final(attempt, error) or self._max_restarts == 0:
            return End(error, attempt.traceback)
        if why := self._hopeless(attempt):
            return self._given_up(why)
        restarts = len(self._series)
        if restarts > self._max_restarts:
            return End(_spent(error, restarts - 1, self._max_restarts), attempt.traceback)
        again = attempt.signature is not None and attempt.signature in [a.signature for a in self._series[:-1]]
        return Restart(self._delay(restarts), error.message.splitlines()[0], again)

    def _count(self, attempt: Attempt) -> None:
        # The first attempt of a command that resumes is measured by where it began.
        before = max(self._furthest, attempt.start or 0) if self.attempts == 1 else self._furthest
        if attempt.stepped and attempt.reached > before:
            self._series, self._idle = [], 0
        else:
            self._idle += 1
        self._furthest = max(before, attempt.reached)
        self._series.append(attempt)

    def _is_final(self, attempt: Attempt, error: PacelineError) -> bool:
        return (
            error.exit_code in NEVER_RETRIED
            or attempt.told_to_stop
            or (attempt.agreed and error.exit_code == 1)
            or (isinstance(error, Stalled) and not self._restart_stalled)
        )

    def _hopeless(self, attempt: Attempt) -> str | None:
        """Why another attempt would be in vain."""
        same = [a for a in self._series if a.signature is not None and a.signature == attempt.signature]
        if len(same) >= 2 and not attempt.stepped and self._series[-2] in same:
            return f"{_times(len(same))} the same failure, and no step after the restart"
        if len(same) >= IDLE_ATTEMPTS:
            return f"{_times(len(same))} the same failure at the same step ({self._furthest})"
        if self._idle >= IDLE_ATTEMPTS:
            return f"{self._idle} attempts without a new step after step {self._furthest}"
        return None

    def _given_up(self, why: str) -> End:
        first = self._series[0]
        assert first.error is not None
        cause = first.error
        error = NoProgress(
            f"{why}; the first failure was: {cause.message}",
            key=cause.key,
            values={**cause.values, "attempts": len(self._series), "step": self._furthest, "first": cause.to_record()},
            hint=cause.hint or "Mend what the first failure says, and give the same command again: the run goes on.",
        )
        return End(error, first.traceback)

    def _delay(self, restarts: int) -> float:
        """Seconds before restart number `restarts` without progress in between, counted from 1."""
        return 0.0 if restarts == 1 else min(LONGEST_BACKOFF_SECONDS, self._backoff_seconds * 2.0 ** (restarts - 2))


def _spent(error: PacelineError, restarts: int, allowed: int) -> PacelineError:
    error.message += f" ({restarts} restart{'' if restarts == 1 else 's'} without a new step, as many as may be)"
    error.values = {**error.values, "restarts": restarts, "recovery.max_restarts": allowed}
    return error


def _times(count: int) -> str:
    return {2: "twice", 3: "three times"}.get(count, f"{count} times")

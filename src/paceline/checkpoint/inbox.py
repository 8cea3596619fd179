"""What has come in for one save, shared by the thread that listens to the ranks and those that write. No torch."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from paceline.checkpoint.manifest import NextStep
from paceline.checkpoint.messages import SaveHead, Staged
from paceline.errors import PacelineError
from paceline.units import format_seconds


class Inbox:
    """The state of one save on one host.

    Args:
        number, step: of the save, as the first rank gave them.
        ranks: of this host; the save needs each one's part.
        timeout: seconds that they have to come.
    """

    def __init__(self, number: int, step: int, ranks: Sequence[int], timeout: float) -> None:
        self.number = number
        self.step = step
        self.head: SaveHead | None = None
        self.own: dict[int, dict[str, Any]] = {}
        self.began = time.monotonic()
        self.deserted_at: float | None = None
        """When the last of this host's ranks was gone (CLOCK_MONOTONIC)."""
        self._ranks = frozenset(ranks)
        self._gone: set[int] = set()
        self._timeout = timeout
        self._deadline = self.began + timeout
        self._taken: set[int] = set()
        self._missing = set(ranks)
        self._problem: Exception | None = None
        self._next: NextStep | None = None
        self._next_known = False
        self._changed = threading.Condition()

    def staged(self, rank: int, message: Staged) -> bool:
        """A rank's part is there; True once all are."""
        with self._changed:
            if message.step != self.step:
                self._stop(_other_step(self.step, rank, message.step))
            self.own[rank] = message.own
            self.head = message.head or self.head
            self.began = min(self.began, message.began)
            self._missing.discard(rank)
            self._changed.notify_all()
            return not self._missing

    def lost(self, rank: int) -> None:
        """A rank is gone. What it had staged stays good."""
        with self._changed:
            if rank in self._missing:
                self._missing.discard(rank)
                self._stop(_lost(rank, self.step))
            self._next_known = True  # its attempt is over: no further step comes
            self._gone.add(rank)
            if self._gone >= self._ranks and self.deserted_at is None:
                self.deserted_at = time.monotonic()
            self._changed.notify_all()

    def next_came(self, result: NextStep | None) -> None:
        with self._changed:
            if not self._next_known:
                self._next, self._next_known = result, True
            self._changed.notify_all()

    def stop(self, problem: Exception) -> None:
        """End the save with this error, unless it has one already."""
        with self._changed:
            self._stop(problem)

    def check(self) -> None:
        """Raise the error that ended the save, if one has."""
        if self._problem is not None:
            raise self._problem

    def take(self) -> int | None:
        """A rank whose part is there and that nobody has taken, as soon as there is one; None when there is none left.

        Raises:
            Exception: what ended the save; PacelineError where a rank did not come in time.
        """
        with self._changed:
            while not (ready := sorted(self.own.keys() - self._taken)):
                self.check()
                if self._taken == self._ranks:
                    return None
                if not self._changed.wait(self._deadline - time.monotonic()):
                    self._stop(_too_late(self._missing, self.step, self._timeout))
            self.check()
            self._taken.add(ready[0])
            return ready[0]

    def await_all(self) -> None:
        """Until each rank has staged, is gone, or has had its time: only then does an answer find all of them waiting."""
        with self._changed:
            while self._missing and self._changed.wait(self._deadline - time.monotonic()):
                pass

    def await_next(self, seconds: float) -> NextStep | None:
        """What the step after this one gave; None where it is not known in time or there is none."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while not self._next_known and self._problem is None and self._changed.wait(deadline - time.monotonic()):
                pass
            self.check()
            return self._next

    def pause(self, seconds: float) -> None:
        """Wait; raises what ended the save meanwhile."""
        with self._changed:
            self.check()
            self._changed.wait(seconds)
            self.check()

    def _stop(self, problem: Exception) -> None:
        self._problem = self._problem or problem
        self._changed.notify_all()


def _other_step(step: int, rank: int, other: int) -> PacelineError:
    return PacelineError(
        f"the ranks do not save the same step: rank {rank} came with step {other}, another one with step {step}",
        values={"rank": rank, "step": other, "other_step": step},
        hint="Decide on one rank when to save, and tell the others.",
    )


def _lost(rank: int, step: int) -> PacelineError:
    return PacelineError(
        f"rank {rank} ended before its part of step {step} was staged", values={"rank": rank, "step": step}
    )


def _too_late(missing: set[int], step: int, timeout: float) -> PacelineError:
    names = ", ".join(map(str, sorted(missing)))
    return PacelineError(
        f"rank {names} did not come to the save of step {step} within {format_seconds(timeout)}",
        key="checkpoint.storage_timeout",
        values={"ranks": sorted(missing), "step": step, "seconds": timeout},
    )

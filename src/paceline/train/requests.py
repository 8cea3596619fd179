"""What a rank is asked for while it trains: to stop, by a signal or a file, or to save; and what comes of it, as an error.

Any rank may hear a signal; the control files are rank 0's to read. Ranks hear of each other's requests by a step's votes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

from paceline.checkpoint.folders import list_steps
from paceline.checkpoint.storage import open_storage
from paceline.errors import Interrupted, PacelineError, Preempted
from paceline.run import control
from paceline.run.control import Control
from paceline.units import format_seconds
from paceline.workers import stop
from paceline.workers.environment import is_supervised
from paceline.workers.verdict import leave_now, write_verdict

Heard = tuple[str, float]
"""How a request came, and how many seconds ago."""


class Requests:
    """The requests to one rank.

    Args:
        files: the run's control files, on rank 0 alone. How many ranks are wanted is the launcher's to read.
        say: for warnings.
    """

    def __init__(self, files: Control | None, say: Callable[[str], None] = lambda text: None) -> None:
        self._files = files
        self._say = say

    def wants_stop(self) -> bool:
        return stop.asked() is not None or self._is_filed(control.STOP)

    def wants_save(self) -> bool:
        return self._is_filed(control.SAVE)

    def heard(self) -> Heard | None:
        """What this rank heard of a stop itself."""
        signalled = stop.asked()
        if signalled is not None:
            return signalled.how, time.monotonic() - signalled.time
        if self._files is not None and self._files.asked(control.STOP):
            return f"control/{control.STOP}", self._files.age_seconds(control.STOP)
        return None

    def saved(self) -> None:
        """A save that was asked for is done."""
        self._done(control.SAVE)

    def stopped(self) -> None:
        """The run has saved and ends, or goes on with other ranks, which leaves a request to stop standing."""
        signalled = stop.asked()
        self._done(control.SAVE)
        if signalled is None or not signalled.how.startswith(control.GOES_ON):
            self._done(control.STOP)

    def _is_filed(self, name: str) -> bool:
        return self._files is not None and self._files.asked(name)

    def _done(self, name: str) -> None:
        if self._files is not None and (problem := self._files.done(name)):
            self._say(problem)


def leave_the_start(ask: stop.Ask) -> None:
    """Before the first step is done nothing is lost: leave at once, whatever the main thread waits for."""
    error = Interrupted(
        f"interrupted by {ask.how}; nothing was saved, as the first step was not done", values={"how": ask.how}
    )
    write_verdict(error.exit_code, error)
    if not is_supervised():
        print(f"paceline: {error}", file=sys.stderr, flush=True)
    leave_now(error.exit_code)


def preempted(step: int, heard: Sequence[Heard | None], waited_seconds: float, grace: float) -> Preempted:
    """The end of a run that has saved after `step`.

    Args:
        heard: what each rank had heard by then.
        waited_seconds: since they told each other.
        grace: seconds that the run may take from a request until its end.
    """
    ranks = [rank for rank, one in enumerate(heard) if one is not None]
    how, age = max((one for one in heard if one is not None), key=lambda one: one[1], default=("a request", 0.0))
    used = age + waited_seconds
    to = f" to rank {ranks[0]}" if len(ranks) == 1 < len(heard) and how.startswith("SIG") else ""
    late = "" if used <= grace else "; that is longer than recovery.grace allows"
    return Preempted(
        f"stopped by {how}{to} after step {step}, state saved: {format_seconds(used)} of {format_seconds(grace)} used{late}",
        values={"step": step, "seconds": used, "grace": grace, "how": how, "ranks": ranks},
        hint="Give the same command again to go on from there.",
    )


def with_what_stands(error: Interrupted, place: str, step: int) -> PacelineError:
    """The end of a run whose last steps were not saved: preempted where a checkpoint stands from which it goes on.

    Args:
        error: as the workers were seen to end. Whoever left at once keeps it.
        place: of the checkpoints.
        step: the last one that is on record.
    """
    if error.values.get("at_once"):
        return error
    try:
        saved = max(list_steps(open_storage(place)), default=None)
    except (OSError, PacelineError):
        return error
    if saved is None:
        return error
    lost = max(0, step - saved)
    redone = f"{lost} step{'s' if lost != 1 else ''} after it will be done again" if lost else "nothing is lost"
    return Preempted(
        f"{error.message.replace('nothing was saved', f'the checkpoint of step {saved} stands, {redone}')}",
        values={**error.values, "step": saved, "steps_lost": lost},
        hint="Give the same command again to go on from there.",
    )

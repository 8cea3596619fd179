"""The attempts of one command: how each ended, as the policy wants to know it, and what the records keep of it. No torch."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from typing import Any

from paceline.errors import DiskFull, Interrupted, PacelineError, Preempted
from paceline.job.resolve import Resolved
from paceline.run.directory import RunDirectory
from paceline.run.records import Fault, Record, Restart, RunFinished, read_records
from paceline.units import format_seconds
from paceline.workers import screen
from paceline.workers.supervise import Attempt
from paceline.workers.supervise import Restart as NextAttempt
from paceline.workers.verdict import Verdict, is_plain
from paceline.workers.watch import GroupResult
from paceline.workers.watchdog import Stall

_FROM_OUTSIDE = (-1, -2, -9, -15)
"""Deaths by SIGHUP, SIGINT, SIGKILL and SIGTERM: two of them in a row say nothing about the job."""

_FROM_ELSEWHERE = ("stopped", "link")
"""Faults of a machine or of who uses it: two of them say nothing about the job either."""

SUSPECTED = "suspected: "
"""How the message of a fault begins that nothing has been done about."""

_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+(?:\.\d+)?(?:e[+-]?\d+)?", re.IGNORECASE)
_RANKS = re.compile(r"\branks? [#, ]+")


def attempt_of(result: GroupResult, directory: RunDirectory) -> Attempt:
    """An attempt that has ended, from what its workers left and from the records of its beginning."""
    return Attempt(
        error=result.error,
        signature=signature(result),
        start=_start_step(directory),
        reached=result.reached if result.reached >= 0 else last_step(directory),
        agreed=_agreed(result.verdicts.values(), len(result.exits)),
        told_to_stop=result.asked is not None,
        traceback=result.traceback,
    )


def signature(result: GroupResult) -> str | None:
    """What makes a failure the same as another one: its kind, its place and its words without the numbers in them."""
    error, told = result.error, result.verdicts.get(-1 if result.rank is None else result.rank)
    if error is None or result.fault in _FROM_ELSEWHERE:
        return None
    if told is None and error.values.get("signal") is not None and _outside(int(error.values["signal"])):
        return None
    raised = (told.error or {}) if told is not None and told.error is not None else {}
    kind = raised.get("kind") or type(error).__name__
    words = str(raised.get("message") or error.message).strip().partition("\n")[0]
    place = (told.where if told is not None else None) or ""
    return f"{kind} at {place}: {_RANKS.sub('rank # ', _NUMBERS.sub('#', words))}"


def _outside(signal_number: int) -> bool:
    return -signal_number in _FROM_OUTSIDE


def _start_step(directory: RunDirectory) -> int | None:
    """The step that this attempt began after; None where it did not come to its first one."""
    for record in read_records(directory.path, kinds=("run_started",)):
        if int(record["attempt"]) == directory.attempt:
            return int(record["step"])
    return None


def last_step(directory: RunDirectory) -> int:
    """The last step that is on record."""
    return max((int(record["step"]) for record in read_records(directory.path, kinds=("step",))), default=0)


def _agreed(verdicts: Iterable[Verdict], procs: int) -> bool:
    """Whether every rank raised the same error of ours."""
    told = [str((verdict.error or {}).get("message")) for verdict in verdicts if is_plain(verdict)]
    return len(told) == procs and len({_NUMBERS.sub("#", message) for message in told}) == 1


class Account:
    """Writes down what the supervisor knows, as far as the disk still takes it."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self.notes: list[str] = []
        """What could not be written, to be said."""

    def fault(self, result: GroupResult, error: PacelineError, step: int, host: str | None = None) -> None:
        """What broke, on this host or another, in the attempt that has just ended. That somebody ended it is no fault, but
        what kept it from ending as it should is one."""
        if isinstance(error, Preempted | Interrupted) and result.fault is None:
            return
        self._write(
            Fault(step=step, rank=result.rank, host=host or os.uname().nodename,
                  kind_of_fault=result.fault or type(error).__name__,
                  evidence=result.evidence or result.traceback or "", message=error.message)
        )  # fmt: skip

    def suspicion(self, stall: Stall) -> None:
        """What looks like a stall and is not sure: nothing has been done about it."""
        first, message = stall.finding.ranks[0], screen.sentence(stall.finding, stall.snapshot)
        self._write(
            Fault(step=max(0, stall.snapshot.ranks[first].step), rank=first, host=stall.snapshot.host,
                  kind_of_fault=stall.finding.kind, evidence=screen.evidence(stall.finding, stall.snapshot),
                  message=f"{SUSPECTED}{message}")
        )  # fmt: skip

    def next_attempt(self, result: GroupResult, reason: str, step: int) -> float:
        """Go over to the next attempt, for `reason`; returns when that was, in seconds since the epoch.

        Raises:
            RunHeld: somebody else has the directory meanwhile.
        """
        self._directory.check_held()
        self.restart(result, reason, step)
        self._directory.next_attempt()
        return time.time()

    def restart(self, result: GroupResult, reason: str, step: int) -> None:
        """That there will be another attempt, here or under another supervisor."""
        seconds = time.monotonic() - result.failed_at
        self._write(Restart(step=step, reason=reason, next_attempt=self._directory.attempt + 1, seconds=seconds))

    def end(self, error: PacelineError, step: int) -> None:
        """The verdict of the command, unless rank 0 has written it with more about it."""
        if isinstance(error, Preempted) and "seconds" in error.values:
            return
        self._write(RunFinished(step=step, exit=error.exit_code, reason=error.message, steps=step, samples=0))

    def _write(self, record: Record) -> None:
        try:
            with self._directory.writer("supervisor") as writer:
                writer.write(record)
        except (DiskFull, OSError) as error:
            self.notes.append(f"{type(record).__name__} could not be recorded: {error}")


def restart_line(outcome: NextAttempt, attempt: int) -> str:
    """What is said before attempt number `attempt`."""
    wait = f" in {format_seconds(outcome.delay_seconds)}" if outcome.delay_seconds else ""
    same = "the same failure again: " if outcome.again else ""
    return f"paceline: {same}{outcome.reason}; starting attempt {attempt}{wait}"


def traceback_lines(text: str | None) -> list[str]:
    """A traceback as something to say."""
    return [text.rstrip()] if text else []


def summary(directory: RunDirectory, resolved: Resolved) -> dict[str, Any]:
    """The figures of `train --json` from the run's records."""
    finished: dict[str, Any] = {}
    last: dict[str, Any] = {}
    for record in read_records(directory.path, kinds=("step", "run_finished")):
        if record["kind"] == "run_finished":
            finished = record
        else:
            last = record
    kept = ("steps", "eval_loss", "bigram_eval_loss", "tokens", "seconds", "tokens_per_second", "mfu")
    return {
        "run_dir": str(directory.path),
        "attempts": directory.attempt,
        **{key: finished.get(key) for key in kept},
        # An attempt that found all steps done has none of its own.
        "loss": finished.get("loss") if finished.get("loss") is not None else last.get("loss"),
        "grad_norm": last.get("grad_norm"),
        "layout": resolved.layout.to_record(),
        "exit": int(finished.get("exit", 0)),
    }

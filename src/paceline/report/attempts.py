"""The records of a run as attempts: who ran when, on how many ranks, and which of its steps still count."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.run.records import latest_steps, read_records, redone

Entry = dict[str, Any]

_BY_OTHERS = ("fault", "restart")
"""Kinds that the supervisor writes after an attempt broke: the time up to them belongs to the restart."""


@dataclass
class Attempt:
    """One attempt. `start` and `end` are seconds since the epoch; `ranks` is its world size."""

    number: int
    ranks: int
    start: float
    end: float
    started: Entry | None = None
    finished: Entry | None = None
    kept: list[Entry] = field(default_factory=list)
    redone: list[Entry] = field(default_factory=list)
    records: list[Entry] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def of(self, kind: str) -> list[Entry]:
        """Its records of one kind, in the order of time."""
        return [record for record in self.records if record["kind"] == kind]

    @property
    def first_step_start(self) -> float | None:
        """When its first step began; None where it took none."""
        steps = self.of("step")
        return max(self.start, steps[0]["time"] - steps[0]["seconds"]) if steps else None


@dataclass
class Run:
    """All attempts of a run, in order."""

    path: Path
    attempts: list[Attempt]
    torn: list[str]

    @property
    def records(self) -> list[Entry]:
        return [record for attempt in self.attempts for record in attempt.records]

    @property
    def kept(self) -> list[Entry]:
        """Each step that counts once, rising."""
        return sorted((step for attempt in self.attempts for step in attempt.kept), key=lambda step: int(step["step"]))

    @property
    def started(self) -> Entry | None:
        """The newest `run_started` record: the layout and the machine in force."""
        return next((attempt.started for attempt in reversed(self.attempts) if attempt.started), None)

    @property
    def finished(self) -> Entry | None:
        """The verdict of the last attempt; None where it left none."""
        return self.attempts[-1].finished if self.attempts else None

    def of(self, kind: str) -> list[Entry]:
        return [record for record in self.records if record["kind"] == kind]


def median(values: Iterable[float]) -> float:
    """The middle of the values, of which there is at least one. (`statistics` costs as much as Python's start.)"""
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def load(run_dir: Path) -> Run:
    """Read a run's records. A crashed run, a torn line or an attempt that died at once is no error."""
    torn: list[str] = []
    records = list(read_records(run_dir, torn=torn))
    return Run(path=Path(run_dir), attempts=group(records), torn=torn)


def group(records: list[Entry]) -> list[Attempt]:
    """Attempts of the records, each with the steps that count and those that were lost."""
    by_number: dict[int, list[Entry]] = {}
    for record in records:
        by_number.setdefault(int(record["attempt"]), []).append(record)
    kept, lost = _by_attempt(latest_steps(records)), _by_attempt(redone(records))
    attempts: list[Attempt] = []
    for number, own in sorted(by_number.items()):
        attempt = _attempt(number, own, attempts[-1] if attempts else None, last=number == max(by_number))
        attempt.kept, attempt.redone = kept.get(number, []), lost.get(number, [])
        attempts.append(attempt)
    return attempts


def _attempt(number: int, own: list[Entry], before: Attempt | None, *, last: bool) -> Attempt:
    started = next((record for record in own if record["kind"] == "run_started"), None)
    finished = next((record for record in reversed(own) if record["kind"] == "run_finished"), None)
    timed = own if last else [record for record in own if record["kind"] not in _BY_OTHERS] or own
    launched = (started or {}).get("launched")
    start = min(timed[0]["time"], launched if launched is not None else timed[0]["time"])
    start = max(start, before.end if before else start)
    ranks = started["world_size"] if started else before.ranks if before else 1
    return Attempt(number, ranks, start, max(start, timed[-1]["time"]), started, finished, records=own)


def _by_attempt(steps: Iterable[Entry]) -> dict[int, list[Entry]]:
    grouped: dict[int, list[Entry]] = {}
    for step in steps:
        grouped.setdefault(int(step["attempt"]), []).append(step)
    return grouped

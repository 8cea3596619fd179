"""What a proof found: as data, and as a page that people can show."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from paceline.rehearsal.compare import CurveDifference, SampleDifference
from paceline.units import format_seconds

if TYPE_CHECKING:
    from paceline.rehearsal.tensors import StateDifference

TOLERANCE = 1e-9
"""Relative difference that another layout may make in float64, whose own rounding is 1e-16 an operation."""

CERTIFICATE_FILE = "certificate.json"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A stopped and resumed run beside the straight one.

    tolerance: relative difference that is allowed; None where every bit must be equal.
    """

    procs: int
    layout: str
    precision: str
    changes: tuple[str, ...]
    tolerance: float | None
    curves: CurveDifference
    samples: SampleDifference
    state: StateDifference

    @property
    def largest(self) -> float:
        return max(self.curves.largest, self.state.largest)

    @property
    def holds(self) -> bool:
        """Whether the resumed run is the straight one, as far as it must be."""
        if not self.samples.equal or self.curves.missing or self.state.missing or self.state.tensors == 0:
            return False
        if self.tolerance is None:
            return self.curves.exact and self.state.exact
        return self.largest <= self.tolerance and self.state.counters_equal


class Certificate(msgspec.Struct, frozen=True, kw_only=True):
    """A proof of exact resume. steps: before the kill, and after it. killed: processes that the kill ended, per run."""

    job: str
    folder: Path
    procs: int
    other: int
    steps: tuple[int, int]
    same: Finding
    elsewhere: Finding
    killed: tuple[int, ...]
    seconds: float
    versions: dict[str, str]
    device: str

    @property
    def holds(self) -> bool:
        return self.same.holds and self.elsewhere.holds

    def document(self) -> dict[str, Any]:
        """`prove --json`, less its schema."""
        same, elsewhere = self.same, self.elsewhere
        return {
            "job": self.job,
            "folder": str(self.folder),
            "procs": self.procs,
            "other": self.other,
            "steps": list(self.steps),
            "bitwise": same.holds,
            "largest_difference": elsewhere.largest if same.holds else max(same.largest, elsewhere.largest),
            "samples_equal": same.samples.equal and elsewhere.samples.equal,
            "verdict": "pass" if self.holds else "fail",
            "tolerance": TOLERANCE,
            "same_ranks": _plain(same),
            "other_ranks": _plain(elsewhere),
            "killed_processes": list(self.killed),
            "seconds": self.seconds,
            "versions": self.versions,
            "device": self.device,
            "exit": 0 if self.holds else 1,
        }

    def describe(self) -> str:
        """The certificate as text."""
        before, after = self.steps
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        verdict = (
            "pass: a stop and a resume leave no trace"
            if self.holds
            else "fail: a resumed run is not the run that it resumes"
        )
        return "\n".join(
            [
                f"certificate of exact resume: {self.job}",
                f"  {before + after} steps straight, beside {before} steps, SIGKILL to all {self.killed[0]} processes once "
                f"the checkpoint was durable, and {after} steps from it",
                *_lines("same ranks", self.same),
                *_lines("other ranks", self.elsewhere),
                f"  {versions}; {self.device}; {format_seconds(self.seconds)}",
                f"verdict: {verdict}",
            ]
        )


def _lines(name: str, found: Finding) -> list[str]:
    changes = f", with {' '.join(found.changes)}" if found.changes else ""
    ranks = f"{found.procs} rank{'s' if found.procs > 1 else ''}"
    return [
        f"  {name}: {ranks} ({found.layout}), {found.precision}{changes}",
        f"    losses and norms  {_curves(found)}",
        f"    samples           {_samples(found.samples)}",
        f"    final state       {_state(found)}",
    ]


def _curves(found: Finding) -> str:
    curves = found.curves
    if curves.missing:
        return f"FAIL: steps {_few(curves.missing)} are missing"
    if curves.exact:
        return f"{curves.steps} of {curves.steps} steps equal bit for bit"
    told = f"equal to {curves.largest:.1e}, from step {curves.first}"
    if found.tolerance is not None and curves.largest <= found.tolerance:
        return f"{told} ({found.tolerance:g} allowed)"
    return f"FAIL: {told}"


def _samples(samples: SampleDifference) -> str:
    if samples.missing:
        return f"FAIL: those of steps {_few(samples.missing)} are not on record"
    if samples.first is not None:
        return f"FAIL: others from step {samples.first}"
    return f"the same in {samples.steps} of {samples.steps} steps"


def _state(found: Finding) -> str:
    state = found.state
    if state.missing:
        return f"FAIL: on one side only: {_few(state.missing)}"
    if found.tolerance is None:
        if state.exact:
            return f"{state.equal} of {state.tensors} tensors, random states and counters equal bit for bit"
        told = (
            [f"{state.tensors - state.equal} of {state.tensors} tensors differ"] if state.equal < state.tensors else []
        )
        told += [f"by {state.largest:.1e} at most ({state.worst})"] if state.worst else []
        told += [] if state.counters_equal else ["counters differ"]
        told += ["random states differ"] if state.random_equal is False else []
        return f"FAIL: {', '.join(told)}"
    at = f" ({state.worst})" if state.worst else ""
    told_so = f"{state.tensors} tensors equal to {state.largest:.1e}{at}, {found.tolerance:g} allowed"
    if not state.counters_equal:
        return f"FAIL: {told_so}; counters differ"
    return told_so if state.largest <= found.tolerance else f"FAIL: {told_so}"


def _few(names: tuple[Any, ...]) -> str:
    shown = ", ".join(map(str, names[:4]))
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"


def _plain(found: Finding) -> dict[str, Any]:
    return {**msgspec.to_builtins(found), "holds": found.holds, "largest_difference": found.largest}

"""Two runs of one job side by side: losses and norms of each step, samples of each step, the final state.

The curves are read from the records; the final state is compared in `tensors.py`, which needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from paceline.run.records import latest_steps, read_records

CURVES = ("loss", "grad_norm")


class CurveDifference(msgspec.Struct, frozen=True, kw_only=True):
    """How two runs' curves differ. `largest` is relative; infinite where one has a number and the other has none.

    first: the first step that is not equal bit for bit; None where all are.
    missing: steps that one of the runs has not done.
    """

    steps: int
    first: int | None
    largest: float
    missing: tuple[int, ...]

    @property
    def exact(self) -> bool:
        return self.first is None and not self.missing


class SampleDifference(msgspec.Struct, frozen=True, kw_only=True):
    """How the samples of two runs differ; `first` is the first step with others, None where there is none."""

    steps: int
    first: int | None
    missing: tuple[int, ...]

    @property
    def equal(self) -> bool:
        return self.first is None and not self.missing


def compare_curves(expected: Path, actual: Path, steps: int, names: Sequence[str] = CURVES) -> CurveDifference:
    """Loss and gradient norm (`names`) of steps 1 to `steps` of two run directories."""
    a, b = _steps(expected), _steps(actual)
    both = [step for step in range(1, steps + 1) if step in a and step in b]
    differing = [step for step in both if any(not _same(a[step], b[step], name) for name in names)]
    largest = [relative(a[step].get(name), b[step].get(name)) for step in differing for name in names]
    return CurveDifference(
        steps=len(both), first=min(differing, default=None), largest=max(largest, default=0.0),
        missing=_missing(a, b, steps),
    )  # fmt: skip


def compare_samples(expected: Path, actual: Path, steps: int) -> SampleDifference:
    """The numbers of the samples of steps 1 to `steps` of two run directories."""
    a, b = _samples(expected), _samples(actual)
    both = [step for step in range(1, steps + 1) if step in a and step in b]
    first = next((step for step in both if a[step] != b[step]), None)
    return SampleDifference(steps=len(both), first=first, missing=_missing(a, b, steps))


def relative(expected: float | None, actual: float | None) -> float:
    """|a - b| / max(|a|, |b|); infinite where one of them is no number."""
    if expected == actual:
        return 0.0
    if expected is None or actual is None or not (math.isfinite(expected) and math.isfinite(actual)):
        return math.inf
    return abs(expected - actual) / max(abs(expected), abs(actual))


def _steps(run_dir: Path) -> dict[int, dict[str, Any]]:
    records = read_records(run_dir, kinds=("run_started", "step"))
    return {int(record["step"]): record for record in latest_steps(records)}


def _samples(run_dir: Path) -> dict[int, list[int]]:
    """Samples by step; an attempt that began before a step does it again."""
    found: dict[int, list[int]] = {}
    for record in read_records(run_dir, kinds=("run_started", "samples")):
        if record["kind"] == "samples":
            found[int(record["step"])] = list(record["ids"])
        else:
            found = {step: ids for step, ids in found.items() if step <= record["step"]}
    return found


def _same(a: Mapping[str, Any], b: Mapping[str, Any], name: str) -> bool:
    """Equal bit for bit: records hold the shortest text that gives the same float64 back, NaN and infinity by name."""
    lost = [record.get("nonfinite", {}).get(name) for record in (a, b)]
    return bool(a.get(name) == b.get(name)) and lost[0] == lost[1]


def _missing(a: Iterable[int], b: Iterable[int], steps: int) -> tuple[int, ...]:
    wanted = set(range(1, steps + 1))
    return tuple(sorted(wanted - (set(a) & set(b))))

"""Whether a trial was survived: how its commands ended, what is left of them, and its run beside the undisturbed one."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from paceline.checkpoint.folders import list_steps
from paceline.checkpoint.storage import open_storage
from paceline.drill.evidence import Evidence, last_step
from paceline.drill.faults import Fault
from paceline.drill.order import MARK
from paceline.errors import NoProgress, PacelineError, Preempted
from paceline.rehearsal.compare import compare_curves, compare_samples
from paceline.rehearsal.trial import Ended

TOLERANCES = {"fp64": 1e-9, "fp32": 1e-5}
"""Relative difference of losses that another number of ranks may make, by precision: the order of sums."""
COARSE = 2e-2
"""The same in 16 bit."""


class Place(msgspec.Struct, frozen=True):
    """A run directory and where its checkpoints are."""

    run_dir: Path
    checkpoints: str

    def saved(self) -> list[int]:
        """The committed steps, rising."""
        return list_steps(open_storage(self.checkpoints))


class Likeness(msgspec.Struct, frozen=True):
    """Two runs up to a step: whether they are equal as far as they must be, and what is not."""

    equal: bool
    largest: float
    why: tuple[str, ...]


def ending(fault: Fault, ends: Sequence[Ended], seen: Evidence, run_dir: Path, steps: int) -> list[str]:
    """What is wrong with how the commands ended; nothing where it is what is promised for the fault."""
    codes = [ended.code for ended in ends]
    if None in codes:
        stuck = ends[codes.index(None)]
        return [f"still there after {stuck.seconds:.0f} s, at step {last_step(run_dir)}"]
    if fault.ends == "no progress":
        found = [] if codes == [NoProgress.exit_code] else [_wrong(codes, NoProgress.exit_code)]
        return found if found or MARK in _printed(ends[0]) else ["the first traceback is not shown"]
    if fault.ends == "bad step":
        return _bad_step(ends[0], seen, steps)
    wanted = [Preempted.exit_code, 0] if fault.ends == "preempted" else [0]
    return [] if codes == wanted else [_wrong(codes, *wanted)]


def likeness(expected: Place, actual: Place, step: int | None, tolerance: float | None) -> Likeness:
    """Compare two runs at a step that both have saved.

    Args:
        tolerance: of losses, relative, across numbers of ranks; None where every bit must be equal.
    """
    if step is None:
        return Likeness(False, 0.0, ("no checkpoint is there to compare",))
    names = ("loss", "grad_norm") if tolerance is None else ("loss",)
    curves = compare_curves(expected.run_dir, actual.run_dir, step, names)
    samples = compare_samples(expected.run_dir, actual.run_dir, step)
    why = []
    if curves.missing or samples.missing:
        why.append(f"steps {sorted({*curves.missing, *samples.missing})[:4]} are not on record")
    if samples.first is not None:
        why.append(f"other samples from step {samples.first}")
    if curves.first is not None and (tolerance is None or curves.largest > tolerance):
        why.append(f"other losses from step {curves.first}, by {curves.largest:.1e}")
    largest = curves.largest
    if tolerance is None:
        state_why, state_largest = _states(expected.checkpoints, actual.checkpoints, step)
        why, largest = [*why, *state_why], max(largest, state_largest)
    return Likeness(not why, largest, tuple(why))


def tolerance_of(precision: str) -> float:
    """Relative difference of losses that another number of ranks may make."""
    return TOLERANCES.get(precision, COARSE)


def _states(expected: str, actual: str, step: int) -> tuple[list[str], float]:
    # Here, since it imports torch: what is wrong with a job is told before.
    tensors = importlib.import_module("paceline.rehearsal.tensors")
    try:
        found = tensors.compare_states(expected, actual, step)
    except PacelineError as error:
        return [error.message], 0.0
    why = []
    if found.missing:
        why.append(f"tensors on one side only: {', '.join(found.missing[:3])}")
    if found.equal < found.tensors:
        why.append(f"{found.tensors - found.equal} of {found.tensors} tensors of step {step} differ ({found.worst})")
    if not found.counters_equal or found.random_equal is False:
        why.append(f"counters or random states of step {step} differ")
    return why, float(found.largest)


def _bad_step(ended: Ended, seen: Evidence, steps: int) -> list[str]:
    """By the policy: a bad step is not taken, and too many of them in a row end the run, which is not tried again."""
    if seen.attempts > 1:
        return [f"tried {seen.attempts} times, though all ranks had decided alike"]
    key = str(((ended.document or {}).get("error") or {}).get("key") or "")
    if ended.code == 1 and key.startswith("optimizer."):
        return []
    if ended.code == 0 and seen.skipped and seen.skipped[-1] == steps:
        return []
    return [f"ended with {ended.code} for another reason than bad steps; {len(seen.skipped)} steps were left out"]


def _wrong(codes: Sequence[int | None], *wanted: int) -> str:
    told, promised = " then ".join(map(str, codes)), " then ".join(map(str, wanted))
    return f"ended with {told}, promised is {promised}"


def _printed(ended: Ended) -> str:
    return re.sub(r"\s+", " ", ended.log.read_text(encoding="utf-8", errors="replace"))

"""What a drill found, as data and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from paceline.units import format_seconds


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One fault and what came of it.

    Attributes:
        survived: the run ended as `docs/guide/exit-codes.md` promises for this fault, and nothing was lost or left behind.
        detect_seconds: from the fault until it stood on record; None where there is nothing to detect, or nothing was.
        recover_seconds: from the fault to the first step after it; None where the run went on, or was to end.
        steps_redone: steps whose work was lost and done again.
        equal: losses, samples and final state are those of the undisturbed run: bit for bit on the same ranks.
        exits: exit code of each command, None for one that was ended at its time limit.
        struck, named: rank and kind of the truth, and those of the record that names it.
        why: what keeps it from being survived.
        how: what was done, with its numbers.
        without: the protection that was off, in a control.
    """

    kind: str
    survived: bool
    detect_seconds: float | None
    recover_seconds: float | None
    steps_redone: int
    equal: bool
    exits: tuple[int | None, ...] = ()
    attempts: int = 0
    largest_difference: float = 0.0
    struck_rank: int | None = None
    struck_step: int | None = None
    named_rank: int | None = None
    named: str | None = None
    why: tuple[str, ...] = ()
    how: str = ""
    without: str = ""
    seconds: float = 0.0
    run_dir: str = ""


class NotRun(msgspec.Struct, frozen=True):
    """A fault that cannot be tried here."""

    kind: str
    reason: str


class Drill(msgspec.Struct, frozen=True, kw_only=True):
    """A whole drill. matrix: by kind of the truth how often the verdicts named which kind."""

    job: str
    folder: str
    procs: int
    steps: int
    seed: int
    trials: tuple[Trial, ...]
    controls: tuple[Trial, ...]
    not_run: tuple[NotRun, ...]
    matrix: dict[str, dict[str, int]]
    blamed: tuple[int, int]
    save_stall_seconds: float
    save_write_seconds: float
    checkpoint_bytes: int
    undisturbed_seconds: float
    seconds: float
    versions: dict[str, str]

    @property
    def lost(self) -> list[Trial]:
        return [trial for trial in self.trials if not trial.survived]

    @property
    def blind(self) -> list[Trial]:
        """Controls that were survived although their protection was off: they prove nothing."""
        return [trial for trial in self.controls if trial.survived]

    @property
    def holds(self) -> bool:
        return not self.lost and not self.blind

    @property
    def recover_seconds(self) -> float | None:
        """The longest recovery of a fault that ends an attempt."""
        known = [
            t.recover_seconds for t in self.trials if t.survived and t.attempts > 1 and t.recover_seconds is not None
        ]
        return max(known, default=None)

    def document(self) -> dict[str, Any]:
        """`drill --json`, less its schema."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return {
            **plain, "verdict": "pass" if self.holds else "fail", "survived": len(self.trials) - len(self.lost),
            "lost": [trial.kind for trial in self.lost], "blind_controls": [trial.without for trial in self.blind],
            "exit": 0 if self.holds else 1,
        }  # fmt: skip

    def describe(self) -> str:
        """The table and the verdict as text."""
        head = f"drill: {self.job}, {self.steps} steps on {self.procs} rank{'s' if self.procs > 1 else ''}, seed {self.seed}"
        blocks = [f"{head}\n{_table(self.trials)}"]
        if self.controls:
            blocks.append(
                f"controls: a protection off, so that its fault must not be survived\n{_controls(self.controls)}"
            )
        if self.not_run:
            blocks.append("not run\n" + "\n".join(f"  {n.kind:<22}{n.reason}" for n in self.not_run))
        if self.matrix:
            blocks.append(_matrix(self.matrix, self.blamed))
        blocks.append(self._verdict())
        return "\n\n".join(blocks)

    def _verdict(self) -> str:
        survived = len(self.trials) - len(self.lost)
        lines = [f"verdict: {'pass' if self.holds else 'fail'}, {survived} of {len(self.trials)} faults survived"]
        for trial in self.lost:
            lines.append(f"  {trial.kind}: {'; '.join(trial.why)}\n    see {trial.run_dir}.log")
        lines += [
            f"  the control without {t.without} was survived: this drill does not see that it is missing"
            for t in self.blind
        ]
        return "\n".join(lines)


HEADINGS = ("fault", "survived", "detect", "recover", "redone", "equal", "named")


def _table(trials: Sequence[Trial]) -> str:
    rows = [HEADINGS, *(_row(trial) for trial in trials)]
    wide = [max(len(row[i]) for row in rows) for i in range(len(HEADINGS))]
    return "\n".join(
        "  " + "  ".join(f"{text:<{w}}" for text, w in zip(row, wide, strict=True)).rstrip() for row in rows
    )


def _row(trial: Trial) -> tuple[str, ...]:
    equal = "yes" if trial.equal else "NO"
    if trial.equal and trial.largest_difference:
        equal = f"to {trial.largest_difference:.0e}"
    named = (
        "-"
        if trial.named is None
        else f"{trial.named}{'' if trial.named_rank is None else f', rank {trial.named_rank}'}"
    )
    return (
        trial.kind, "yes" if trial.survived else "NO", _seconds(trial.detect_seconds), _seconds(trial.recover_seconds),
        str(trial.steps_redone), equal, named,
    )  # fmt: skip


def _controls(trials: Sequence[Trial]) -> str:
    return "\n".join(
        f"  without {t.without:<22}{t.kind:<22}{'SURVIVED' if t.survived else 'lost, as it must be: ' + '; '.join(t.why)}"
        for t in trials
    )


def _matrix(matrix: dict[str, dict[str, int]], blamed: tuple[int, int]) -> str:
    right, of = blamed
    lines = ["verdicts against what was done"]
    for kind, found in matrix.items():
        lines.append(f"  {kind:<22}" + ", ".join(f"{name} {count}" for name, count in sorted(found.items())))
    lines.append(f"  rank named rightly in {right} of {of}")
    return "\n".join(lines)


def _seconds(value: float | None) -> str:
    return "-" if value is None else format_seconds(value)

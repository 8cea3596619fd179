"""Whether a stall is named rightly: faults on drawn ranks of three, each verdict held against what was done.

    python -m benchmarks.verdicts [--each N] [--seed S] [--kinds stopped,skipped,...] [--sound SECONDS]

Prints the confusion matrix (what was done down, what was said across), in how many the rank was right, and the seconds
from the fault to the verdict. `--sound` also runs that long with evaluations, saves of 20 s and steps of ten times the usual
length, which nothing may end.
"""

from __future__ import annotations

import collections
import contextlib
import io
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.program import finish, parser
from benchmarks.record import Figure, say
from paceline.workers.limits import Limits
from paceline.workers.start import start
from paceline.workers.watch import GroupResult, watch

EXPECTED = {
    "stopped": ("stopped",),
    "dead": ("dead",),
    "asleep": ("missing-collective",),
    "skipped": ("missing-collective", "mismatched-collective"),
    "mismatched": ("mismatched-collective",),
    "size": ("mismatched-collective",),
    "loader": ("loader",),
    "gil": ("gil",),
    "gil-idle": ("gil",),
    "spinning": ("spinning",),
}
"""What each fault may be called. A rank that skips a collective and goes on to the next has both: it misses one, and enters
another in its place."""

RANKS = 3
FAULT_STEP = 12
PROMISED_SECONDS = 3.0
PROMISED_STEPS = 5.0
"""A stall is named within the longer of the two, the second in 99th percentiles of the steps seen."""


class Trial(NamedTuple):
    """One fault and its verdict. `seconds` to the first word of it, of which there may be `promised`; `acted` to the end."""

    kind: str
    rank: int
    said: str | None
    said_rank: int | None
    seconds: float | None
    acted: float | None
    promised: float

    @property
    def right(self) -> bool:
        return self.said in EXPECTED[self.kind] and self.said_rank == self.rank


def trial(kind: str, rank: int, folder: Path, step: int = FAULT_STEP) -> tuple[Trial, GroupResult, str]:
    """Run three ranks, one of which goes wrong; with what was printed."""
    truth = folder / f"truth-{time.monotonic_ns()}.jsonl"
    out, warned, limits = io.StringIO(), list[float](), Limits()
    group = start(
        [kind, str(rank), str(step), "1000", str(truth)], procs=RANKS, run_id="verdicts", module="benchmarks.stalling"
    )
    result = watch(group, limits=limits, out=out, warn=lambda stall: warned.append(time.monotonic()))
    ended = time.monotonic()
    if not truth.exists():
        # The run was ended before the fault: a false alarm, or no run at all.
        early = f"too early: {result.fault or result.exit_code}"
        return Trial(kind, rank, early, result.rank, None, None, PROMISED_SECONDS), result, out.getvalue()
    done = json.loads(truth.read_text(encoding="utf-8").splitlines()[0])
    acted = ended - done["monotonic"]
    first = warned[0] - done["monotonic"] if warned else acted
    values = result.error.values if result.error is not None else {}
    said = result.fault or ("dead" if "signal" in values else None)
    promised = max(PROMISED_SECONDS, PROMISED_STEPS * limits.seen("step").quantile(0.99))
    return Trial(kind, rank, said, result.rank, first, acted, promised), result, out.getvalue()


def drawn(each: int, kinds: Sequence[str], seed: int) -> list[tuple[str, int]]:
    """Each kind so often, on drawn ranks, in a drawn order."""
    draw = random.Random(seed)
    made = [(kind, draw.randrange(RANKS)) for kind in kinds for _ in range(each)]
    draw.shuffle(made)
    return made


def matrix(trials: Sequence[Trial]) -> str:
    """What was done down, what was said across."""
    said = sorted({trial.said or "nothing" for trial in trials})
    rows = [["", *said, "rank right"]]
    for kind in [k for k in EXPECTED if any(t.kind == k for t in trials)]:
        own = [trial for trial in trials if trial.kind == kind]
        counts = collections.Counter(trial.said or "nothing" for trial in own)
        right = sum(trial.said_rank == trial.rank for trial in own)
        rows.append([kind, *(str(counts[word] or "") for word in said), f"{right} of {len(own)}"])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def sound(seconds: float, folder: Path) -> tuple[int, list[str]]:
    """A sound run for so long: how often it was ended, and what was suspected."""
    ended, suspected, began = 0, list[str](), time.monotonic()
    while (left := seconds - (time.monotonic() - began)) > 0:
        # Some 0.3 s a step with its evaluations and saves, of three ranks on two processors.
        steps = max(20, int(left / 0.4))
        group = start(
            ["sound", "-1", "0", str(steps), str(folder / "none")],
            procs=RANKS,
            run_id="verdicts",
            module="benchmarks.stalling",
        )
        result = watch(
            group, limits=Limits(), out=io.StringIO(), warn=lambda stall: suspected.append(stall.finding.kind)
        )
        if result.asked is not None:
            raise KeyboardInterrupt(result.asked)
        ended += result.error is not None
        if result.error is not None:
            say(f"ended: {result.error}")
    return ended, suspected


def _figures(trials: Sequence[Trial]) -> list[Figure]:
    figures = []
    for kind in [k for k in EXPECTED if any(t.kind == k for t in trials)]:
        own = [trial for trial in trials if trial.kind == kind]
        right = sum(trial.right for trial in own)
        slowest = max(own, key=lambda trial: (trial.seconds or 0.0) / trial.promised)
        in_time = all((trial.seconds or 0.0) <= trial.promised for trial in own)
        acted = max(trial.acted or 0.0 for trial in own)
        figures.append(
            Figure(f"{kind} named rightly", f"{len(own)} of {len(own)}", f"{right} of {len(own)}", right == len(own))
        )
        figures.append(
            Figure(f"{kind} named within", f"{slowest.promised:.2f} s", f"{slowest.seconds or 0.0:.2f} s", in_time)
        )
        figures.append(Figure(f"{kind} ended within", "-", f"{acted:.2f} s"))
    right = sum(trial.right for trial in trials)
    share = right / max(1, len(trials))
    return [*figures, Figure("all kinds named rightly", "90%", f"{share:.0%}, {right} of {len(trials)}", share >= 0.9)]


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--each", type=int, default=20, help="faults of each kind")
    options.add_argument("--seed", type=int, default=None)
    options.add_argument("--kinds", default=",".join(EXPECTED))
    options.add_argument("--sound", type=float, default=0.0, help="seconds of a sound run besides")
    args = options.parse_args()
    seed = args.seed if args.seed is not None else random.randrange(1 << 30)
    say(f"seed {seed}")
    trials = []
    with tempfile.TemporaryDirectory(prefix="paceline-verdicts-") as folder:
        for kind, rank in drawn(1 if args.quick else args.each, args.kinds.split(",") if args.kinds else [], seed):
            one, result, printed = trial(kind, rank, Path(folder))
            trials.append(one)
            say(
                f"{kind} on rank {rank}: {one.said} on rank {one.said_rank}, "
                f"named in {one.seconds or 0.0:.2f} s, ended in {one.acted or 0.0:.2f} s"
            )
            if not one.right:
                say(f"  WRONG: {result.error}\n{printed[-3000:]}")
        print(matrix(trials) if trials else "", flush=True)
        figures = _figures(trials) if trials else []
        if args.sound:
            ended, suspected = sound(args.sound, Path(folder))
            figures.append(Figure(f"ends of {args.sound:g} s of sound running", "0", str(ended), ended == 0))
            figures.append(Figure("suspicions told in it", "-", str(dict(collections.Counter(suspected)))))
    with contextlib.suppress(BrokenPipeError):
        return finish("verdicts", figures, {"seed": seed, "trials": [t._asdict() for t in trials]}, args, [])
    return 0


if __name__ == "__main__":
    sys.exit(main())

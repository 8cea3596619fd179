"""Many faults from one seed, each in a run of its own of the tiny job on two ranks: all must be survived.

    python -m benchmarks.faults                    200 of all kinds, evenly drawn
    python -m benchmarks.faults --count 100 --kinds kill,kill-in-save

Each run is compared with the undisturbed one: losses, samples, weights, moments and random states bit for bit. A run that
survived is removed; one that did not stays in the folder that is printed.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.launch import PROCS
from benchmarks.program import finish, parser
from benchmarks.record import ROOT, Figure, say
from paceline.drill.faults import BY_KIND, Fault
from paceline.drill.result import Trial
from paceline.drill.run import begin, blamed, chosen, scored
from paceline.drill.trials import STEPS, Ground, try_fault
from paceline.run.records import read_records

COUNT, QUICK_COUNT = 200, 2
NAMED_SHARE = 0.9
FLOOR_SECONDS, STEP_FACTOR = 3.0, 5.0
"""A fault is to be on record within the longer of that and so many times the 99th percentile of a step."""


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--count", type=int, help=f"faults; {COUNT} unless given")
    options.add_argument(
        "--seed", type=int, default=None, help="of kinds, ranks, steps and moments; drawn unless given"
    )
    options.add_argument("--kinds", default="", help="these alone")
    args = options.parse_args()
    seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    wanted = chosen([kind for kind in args.kinds.split(",") if kind])
    words = [str(ROOT / "examples" / "tiny.toml")]
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    os.chdir(folder)
    ground, not_run = begin(words, PROCS, seed, wanted, say)
    left_out = {one.kind for one in not_run}
    trials = draw(
        ground, [f for f in wanted if f.kind not in left_out], args.count or (QUICK_COUNT if args.quick else COUNT)
    )
    say(f"seed {seed}; what was not survived stands in {ground.folder}")
    details = {
        "seed": seed, "matrix": scored(trials), "not_run": [msgspec.to_builtins(one) for one in not_run],
        "trials": [msgspec.to_builtins(trial) for trial in trials],
    }  # fmt: skip
    return finish("faults", figures_of(trials, slowest_step(ground)), details, args, words)


def draw(ground: Ground, kinds: Sequence[Fault], count: int) -> list[Trial]:
    """Trials of drawn kinds, one after the other."""
    drawn = random.Random(f"{ground.seed} kinds")
    trials = []
    for number in range(count):
        fault = drawn.choice(list(kinds))
        name = f"{number:03d}-{fault.kind}"
        trial = try_fault(ground, fault, name=name)
        told = "survived" if trial.survived else f"NOT survived: {'; '.join(trial.why)}"
        say(f"  {number + 1}/{count} {fault.kind}: {told}")
        trials.append(trial)
        if trial.survived:
            for path in ground.folder.glob(f"{name}*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    return trials


def slowest_step(ground: Ground) -> float:
    """The 99th percentile of the undisturbed run's steps after the first, in seconds."""
    seconds = sorted(float(r["seconds"]) for r in read_records(ground.undisturbed.run_dir, kinds=("step",)))[:-1]
    return seconds[min(len(seconds) - 1, round(0.99 * len(seconds)))]


def figures_of(trials: Sequence[Trial], step_seconds: float) -> list[Figure]:
    """What was wanted of all, and of each kind how long it took."""
    survived = sum(trial.survived for trial in trials)
    right, of = blamed(trials)
    limit = max(FLOOR_SECONDS, STEP_FACTOR * step_seconds)
    sudden = [t for t in trials if t.detect_seconds is not None and not BY_KIND[t.kind].alive and t.kind in HANGS]
    late = max((t.detect_seconds or 0.0 for t in sudden), default=0.0)
    figures = [
        Figure("faults survived", "all", f"{survived} of {len(trials)}", survived == len(trials)),
        Figure("equal bit for bit (other ranks: losses)", "all", f"{sum(t.equal for t in trials)} of {len(trials)}",
               all(t.equal for t in trials)),
        Figure("rank named rightly", f"{NAMED_SHARE:.0%}", f"{right} of {of}", right >= NAMED_SHARE * of),
        Figure("longest until a hang is on record", f"{limit:.1f} s", f"{late:.2f} s", late <= limit),
    ]  # fmt: skip
    for kind in sorted({trial.kind for trial in trials}):
        figures.append(_of_kind(kind, [trial for trial in trials if trial.kind == kind]))
    return figures


HANGS = ("stop", "skipped-collective", "stuck-loader", "held-gil")


def _of_kind(kind: str, trials: Sequence[Trial]) -> Figure:
    def middle(values: Sequence[Any]) -> str:
        known = [float(value) for value in values if value is not None]
        return f"{statistics.median(known):.2f} s (longest {max(known):.2f})" if known else "-"

    redone = max(trial.steps_redone for trial in trials)
    seen, back = middle([t.detect_seconds for t in trials]), middle([t.recover_seconds for t in trials])
    told = f"detected in {seen}, at work again in {back}"
    return Figure(f"{kind}, {len(trials)} times", "", f"{told}, at most {redone} of {STEPS} steps redone")


if __name__ == "__main__":
    sys.exit(main())

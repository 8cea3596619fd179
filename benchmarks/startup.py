"""From the command to the end of the first step, against the hand-written loop under torchrun; and the first batch.

    python -m benchmarks.startup

Both run the tiny job on two processes, eager fp32, its data prepared before: `paceline train` and
`torchrun --standalone --nproc-per-node 2`. The clock starts where the command does. paceline's first step ends where its
record says so; its beginning is that less the step's seconds.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.launch import PROCS, environment, resolve, run_ranks
from benchmarks.pairs import Interval, bootstrap_median, first_goes_first
from benchmarks.program import finish, parser
from benchmarks.recipe import recipe_of
from benchmarks.record import ROOT, Figure, say
from paceline.data.prepare import prepare
from paceline.job.load import load_job, split_words
from paceline.run.records import read_records

TARGET_SECONDS = 1.0
FIRST_BATCH_SECONDS = 0.2
PAIRS = 12
LIMIT_SECONDS = 300.0

WORDS = [
    str(ROOT / "examples" / "tiny.toml"), "run.steps=3", "data.eval_fraction=0", "parallel.precision=fp32",
    f"launch.procs_per_node={PROCS}",
]  # fmt: skip


class CommandFailed(Exception):
    """A command of either side ended with another exit code than 0."""


def script(name: str) -> list[str]:
    """An installed command beside this interpreter."""
    found = Path(sys.executable).with_name(name)
    return (
        [str(found)]
        if found.exists()
        else [sys.executable, "-m", {"torchrun": "torch.distributed.run"}.get(name, name)]
    )


def run_paceline(folder: Path) -> dict[str, float]:
    """Seconds from the command to the first step's begin and end, and to the command's own end."""
    runs = folder / "runs"
    started = time.time()
    _run([*script("paceline"), "train", *WORDS, f"run.dir={json.dumps(str(runs))}", "checkpoint.resume=never"])
    ended = time.time()
    newest = max(runs.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    first = next(r for r in read_records(newest, kinds=("step",)) if r["step"] == 1)
    last = max(r["step"] for r in read_records(newest, kinds=("step",)))
    loss = next(r["loss"] for r in read_records(newest, kinds=("step",)) if r["step"] == last)
    first_end = first["time"] - started
    return {"began": first_end - first["seconds"], "ended": first_end, "command": ended - started, "loss": loss}


def run_handwritten(folder: Path) -> dict[str, float]:
    """The same of the hand-written loop."""
    told = folder / "handwritten.json"
    started = time.time()
    _run(
        [*script("torchrun"), "--standalone", f"--nproc-per-node={PROCS}", "-m", "benchmarks.handwritten",
         str(folder / "job.pickle"), str(told)]
    )  # fmt: skip
    ended = time.time()
    found = json.loads(told.read_text(encoding="utf-8"))
    return {
        "began": found["began"] - started, "ended": found["ended"] - started, "command": ended - started,
        "loss": found["loss"],
    }  # fmt: skip


def _run(command: list[str]) -> None:
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
    )
    if done.returncode != 0:
        say(done.stdout + done.stderr)
        raise CommandFailed(f"{' '.join(command)} ended with exit code {done.returncode}")


def measure(pairs: int) -> list[dict[str, dict[str, float]]]:
    """Whole commands in turn; one of each first, unmeasured, so that files and caches are warm."""
    sides = {"paceline": run_paceline, "handwritten": run_handwritten}
    found: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name:
        folder = Path(name)
        resolved = resolve(WORDS)
        data = prepare(load_job(*split_words(WORDS)).data)
        (folder / "job.pickle").write_bytes(pickle.dumps((recipe_of(resolved), data.train)))
        for pair in range(-1, pairs):
            order = list(sides) if first_goes_first(pair) else list(sides)[::-1]
            taken = {side: _with_one_retry(sides[side], folder) for side in order}
            if pair >= 0:
                found.append(taken)
                say(
                    f"  pair {pair + 1}/{pairs}: {taken['paceline']['ended']:.2f} s / {taken['handwritten']['ended']:.2f} s"
                )
    return found


def _with_one_retry(run: Callable[[Path], dict[str, float]], folder: Path) -> dict[str, float]:
    """A run that failed counts for nothing; one that fails twice ends the program."""
    try:
        return run(folder)
    except CommandFailed as failure:
        say(f"  once more: {failure}")
        return run(folder)


def difference(found: list[dict[str, dict[str, float]]], what: str) -> Interval:
    return bootstrap_median([pair["paceline"][what] - pair["handwritten"][what] for pair in found])


def median(found: list[dict[str, dict[str, float]]], side: str, what: str) -> float:
    return bootstrap_median([pair[side][what] for pair in found]).median


def startup_figures(found: list[dict[str, dict[str, float]]]) -> list[Figure]:
    figures = []
    for what, target in (("ended", TARGET_SECONDS), ("began", None), ("command", None)):
        gap = difference(found, what)
        seconds = [median(found, side, what) for side in ("paceline", "handwritten")]
        losses = [pair[side]["loss"] for pair in found[-1:] for side in ("paceline", "handwritten")]
        named = {"ended": "end of the first step", "began": "begin of the first step", "command": "end of the command"}
        figures.append(
            Figure(
                f"command to {named[what]}, over hand-written",
                f"<= {target:g} s" if target else "",
                f"{gap} s, {len(found)} pairs; {seconds[0]:.2f} / {seconds[1]:.2f} s; "
                f"loss {losses[0]:.4f} / {losses[1]:.4f}",
                gap.median <= target if target else None,
            )
        )
    return figures


def first_batch_figure(found: dict[str, Any]) -> Figure:
    seconds = [max(both) for both in zip(*(rank["first_batches"] for rank in found["ranks"]), strict=True)]
    middle = bootstrap_median(seconds)
    measured = f"{middle} s, longest {max(seconds):.3f} s of {len(seconds)}"
    return Figure(
        "first batch of a loader", f"<= {FIRST_BATCH_SECONDS} s", measured, middle.median <= FIRST_BATCH_SECONDS
    )


def main() -> int:
    args = parser(__doc__).parse_args()
    say("command to first step, paceline and hand-written in turn")
    found = measure(2 if args.quick else PAIRS)
    say("first batch")
    alone = run_ranks(
        "benchmarks.one_side", WORDS, {"side": "paceline", "steps": 2, "first_batches": 3 if args.quick else 15}
    )
    figures = [*startup_figures(found), first_batch_figure(alone)]
    return finish("startup", figures, {"pairs": found, "first_batch": alone["ranks"]}, args, WORDS)


if __name__ == "__main__":
    sys.exit(main())

"""Predicted step seconds of runs on this machine beside what they took: the cluster is measured first, then each job runs.

    python -m benchmarks.plan_own_runs

`paceline bench collectives` and `bench compute` measure the cluster for two ranks; `paceline plan --fixed` predicts each job
from that file alone; `paceline train` runs it. Measured is the median of the steps of the second half. One thread a rank. All
of it is done in rounds, the cluster measured anew in each, and a job's error is the median of its rounds: a shared processor
is fast and slow by turns. Beside the error stands whether the range P10 to P90 held what was measured.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.launch import environment
from benchmarks.program import finish, parser
from benchmarks.record import ROOT, Figure, say
from benchmarks.text import one_document_words
from paceline.cluster.spec import MEASURED_FILE
from paceline.run.records import PARTS
from paceline.units import format_percent, format_seconds

WORST, MEDIAN = 0.15, 0.07
PROCS = 2
STEPS, QUICK_STEPS = 12, 4
ROUNDS = 3


class Run(NamedTuple):
    """A job by its words."""

    name: str
    procs: int
    words: tuple[str, ...]


FP32, BF16 = "parallel.precision=fp32", "parallel.precision=bf16"
RUNS = (
    Run("one rank, fp32", 1, (FP32,)),
    Run("one rank, bf16", 1, (BF16,)),
    Run("dp=2, fp32", 2, (FP32,)),
    Run("dp=2, bf16", 2, (BF16,)),
    Run("dp_shard=2, stage 3, fp32", 2, ("parallel.dp_shard=2", FP32)),
    Run("dp_shard=2, stage 1, bf16", 2, ("parallel.dp_shard=2", "parallel.zero_stage=1", BF16)),
    Run("tp=2, fp32", 2, ("parallel.tp=2", FP32)),
    Run("tp=2, bf16", 2, ("parallel.tp=2", BF16)),
    Run("pp=2, 4 micro-batches, fp32", 2, ("parallel.pp=2", "batch.microbatch=2", FP32)),
    Run("cp=2, fp32", 2, ("parallel.cp=2", FP32)),
    Run("dp=2, recompute full, fp32", 2, ("parallel.recompute=full", FP32)),
    Run("dp=2, accumulation 4, fp32", 2, ("batch.microbatch=1", FP32)),
)


def paceline(*words: str, folder: Path = ROOT, limit: float = 300.0) -> str:
    """The output of a command in a folder."""
    command = [sys.executable, "-m", "paceline", *words]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=limit,
        check=True,
    )
    return done.stdout.decode()


def measure_cluster(folder: Path, quick: bool) -> None:
    """Measure what two ranks of this machine do; a plan in the folder finds it."""
    path = folder / MEASURED_FILE
    largest = "1MiB" if quick else "16MiB"
    paceline("bench", "collectives", "--procs", str(PROCS), "--max", largest, "--save", str(path), "--json")
    paceline("bench", "compute", "--procs", str(PROCS), "--save", str(path), "--json")


def words_of(run: Run) -> list[str]:
    base = [str(ROOT / "examples" / "small.toml"), *one_document_words(), "batch.global_batch=8", "launch.threads=1"]
    return [*base, "parallel.compile=false", *run.words]


def predicted(run: Run, folder: Path) -> dict[str, Any]:
    """The plan's chosen layout, which is the given one."""
    text = paceline("plan", *words_of(run), "--fixed", "--procs", str(run.procs), "--json", folder=folder)
    chosen: dict[str, Any] = json.loads(text)["chosen"]
    return chosen


def measured(run: Run, folder: Path, steps: int) -> tuple[float, dict[str, float]]:
    """Median seconds of a step in the second half of a run, and of its parts on rank 0."""
    place = folder / run.name.replace(" ", "-").replace(",", "").replace("=", "")
    words = [f"run.steps={steps}", f"run.dir={json.dumps(str(place))}", "checkpoint.every=end"]
    paceline("train", *words_of(run), *words, "--procs", str(run.procs), "--json")
    lines = [line for path in place.rglob("*.jsonl") for line in path.read_text().splitlines()]
    records = [json.loads(line) for line in lines]
    late = [one for one in records if one.get("kind") == "step" and one["step"] > steps // 2]
    parts = {name: statistics.median(one["parts"].get(name, 0.0) for one in late) for name in PARTS}
    return statistics.median(one["seconds"] for one in late), parts


def compared(run: Run, folder: Path, steps: int) -> dict[str, Any]:
    """One round of a job: its plan beside what it took."""
    plan, (took, parts) = predicted(run, folder), measured(run, folder, steps)
    seconds = plan["step_seconds"]
    return {
        "run": run.name, "measured": took, "parts": parts, "error": seconds / took - 1, "plan": seconds,
        "plan_parts": plan["step_parts"], "in_range": plan["step_p10_seconds"] <= took <= plan["step_p90_seconds"],
    }  # fmt: skip


def figure(run: Run, rounds: list[dict[str, Any]]) -> Figure:
    """The median error of a job's rounds."""
    error = middle_error(rounds)
    plan, took = (statistics.median(one[key] for one in rounds) for key in ("plan", "measured"))
    spread = max(one["measured"] for one in rounds) / min(one["measured"] for one in rounds) - 1
    told = (
        f"{format_percent(error)}: {format_seconds(plan)} for {format_seconds(took)}, which varied by "
        f"{format_percent(spread)} in {len(rounds)} rounds"
    )
    return Figure(run.name, f"within {WORST:.0%}", told, abs(error) <= WORST)


def middle_error(rounds: list[dict[str, Any]]) -> float:
    return statistics.median(float(one["error"]) for one in rounds)


def main() -> int:
    args = parser(__doc__).parse_args()
    runs, steps, count = (RUNS[:2], QUICK_STEPS, 1) if args.quick else (RUNS, STEPS, ROUNDS)
    details: list[dict[str, Any]] = []
    for number in range(1, count + 1):
        with tempfile.TemporaryDirectory(prefix="paceline-own-") as name:
            folder = Path(name)
            measure_cluster(folder, args.quick)
            say(f"round {number} of {count}: measured the cluster")
            for run in runs:
                details.append({"round": number, **compared(run, folder, steps)})
                say(f"  {run.name}: {format_percent(details[-1]['error'])}")
    by_run = {run: [one for one in details if one["run"] == run.name] for run in runs}
    figures = [figure(run, rounds) for run, rounds in by_run.items()]
    middle = statistics.median(abs(middle_error(rounds)) for rounds in by_run.values())
    inside = sum(one["in_range"] for one in details) / len(details)
    figures += [
        Figure("median of all", f"<= {MEDIAN:.0%}", f"{format_percent(middle)} of {len(runs)} jobs", middle <= MEDIAN),
        Figure("inside P10 to P90", "75 to 85%", f"{format_percent(inside)} of {len(details)}", inside >= 0.75),
    ]
    return finish("plan_own_runs", figures, {"runs": details}, args, words_of(RUNS[0]))


if __name__ == "__main__":
    sys.exit(main())

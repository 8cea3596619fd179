"""How long commands take to start, in multiples of bare Python's own start, all of them in turn.

    python -m benchmarks.command_start

`--help` may take 3x. `plan`, `plan --fixed`, `report` and `train --explain` may take 6x plus their work, which is the time
of the same command run again in a process that has imported everything. A job that cannot run is refused in under a second.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.launch import environment
from benchmarks.pairs import bootstrap_median
from benchmarks.program import finish, parser
from benchmarks.record import ROOT, Figure, say
from benchmarks.startup import script
from paceline.cli import COMMANDS

HELP_TARGET, TARGET = 3.0, 6.0
REFUSAL_SECONDS = 1.0
REFUSED = 78
ROUNDS = 20
LIMIT_SECONDS = 120.0
BARE = [sys.executable, "-c", "pass"]

AGAIN = """
import contextlib, io, json, sys, time
from paceline.cli import main
words = json.loads(sys.argv[1])
spent = []
for _ in range(3):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        began = time.perf_counter()
        code = main(words)
        spent.append(time.perf_counter() - began)
    if code:
        sys.exit(code)
print(min(spent[1:]))
"""
"""The first run imports; the quicker of the next two is the command's own work."""


def commands(run_dir: str) -> dict[str, list[str]]:
    """Words of each command that is timed."""
    job = str(ROOT / "examples" / "tiny.toml")
    helps = {f"{name} --help": [name, "--help"] for name in COMMANDS}
    return {
        "--help": ["--help"],
        **helps,
        "plan --fixed": ["plan", job, "--fixed", "--json"],
        "plan": ["plan", job, "--json"],
        "train --explain": ["train", job, "--explain"],
        "report": ["report", run_dir, "--json"],
    }


def refusals() -> dict[str, list[str]]:
    """Words of jobs that are refused: degrees that miss the ranks, a stage without effect, settings that contradict."""
    job = str(ROOT / "examples" / "tiny.toml")
    sharded = ["parallel.dp_shard=2", "--procs", "2"]
    return {
        "degrees": ["train", job, "parallel.dp_shard=3", "--procs", "4"],
        "no effect": ["train", job, "parallel.zero_stage=2", "--procs", "1"],
        "contradiction": ["train", job, *sharded, "parallel.precision=bf16", "parallel.parameter_dtype=bf16"],
    }


def wall_seconds(command: Sequence[str], code: int = 0) -> float:
    """Seconds of a command that ends with exit code `code`."""
    began = time.perf_counter()
    # As an installed command runs: its modules compiled once and kept.
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, timeout=LIMIT_SECONDS, check=False)
    spent = time.perf_counter() - began
    if done.returncode != code:
        raise SystemExit(f"{' '.join(command)} ended with exit code {done.returncode}: {done.stderr.decode()[-500:]}")
    return spent


def measure(words: dict[str, list[str]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each command, round by round, each round beginning with another one; `bare` is Python's own start."""
    everything = {"bare": BARE, **{name: [*script("paceline"), *w] for name, w in words.items()}}
    names = list(everything)
    found: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-1, rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            spent = wall_seconds(everything[name])
            if turn >= 0:
                found[name].append(spent)
        if turn >= 0 and turn % 5 == 4:
            say(f"  round {turn + 1}/{rounds}")
    return found


def work_seconds(words: Sequence[str]) -> float:
    """The command's own work, without the interpreter's start and without imports."""
    done = subprocess.run(
        [sys.executable, "-c", AGAIN, json.dumps(list(words))],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(words)}, run again: {done.stderr[-500:]}")
    return float(done.stdout.split()[-1])


def figures_of(found: dict[str, list[float]], work: dict[str, float]) -> list[Figure]:
    bare = found["bare"]
    figures = [Figure("bare Python's start", "", f"{statistics.median(bare) * 1000:.0f} ms, {len(bare)} rounds")]
    for name, seconds in found.items():
        if name == "bare":
            continue
        target, own = (TARGET, work[name]) if name in work else (HELP_TARGET, 0.0)
        ratio = bootstrap_median([(s - own) / b for s, b in zip(seconds, bare, strict=True)])
        whole = statistics.median(seconds)
        imports = whole - own - statistics.median(bare)
        told = f"{ratio}x; {whole * 1000:.0f} ms, of it imports and parsing {imports * 1000:.0f} ms"
        told += f", work {own * 1000:.0f} ms" if name in work else ""
        more = " plus its work" if name in work else ""
        figures.append(Figure(f"paceline {name}", f"<= {target:g}x bare Python{more}", told, ratio.median <= target))
    return figures


def refusal_figure(rounds: int) -> tuple[Figure, dict[str, list[float]]]:
    """The longest median over the refusals."""
    found = {
        name: [wall_seconds([*script("paceline"), *words], REFUSED) for _ in range(rounds)]
        for name, words in refusals().items()
    }
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    shown = ", ".join(f"{name} {seconds * 1000:.0f} ms" for name, seconds in medians.items())
    longest = max(medians.values())
    figure = Figure("a job that is refused", f"< {REFUSAL_SECONDS:g} s", shown, longest < REFUSAL_SECONDS)
    return figure, found


def a_run(folder: Path) -> str:
    """A short run for `report` to explain."""
    words = [str(ROOT / "examples" / "tiny.toml"), "run.steps=12", "data.eval_sequences=8", "run.name=reported"]
    command = [*script("paceline"), "train", *words, f"run.dir={json.dumps(str(folder))}"]
    wall_seconds(command)
    return str(folder / "reported")


def main() -> int:
    args = parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name:
        say("a short run to report on")
        words = commands(a_run(Path(name)))
        rounds = 3 if args.quick else ROUNDS
        say(f"{rounds} rounds of {len(words)} commands")
        found = measure(words, rounds)
        work = {name: work_seconds(w) for name, w in words.items() if "--help" not in w}
        say("refusals")
        refused, refusal_seconds = refusal_figure(rounds)
    details: dict[str, Any] = {"seconds": found, "work_seconds": work, "refusal_seconds": refusal_seconds}
    return finish("command_start", [*figures_of(found, work), refused], details, args, list(words))


if __name__ == "__main__":
    sys.exit(main())

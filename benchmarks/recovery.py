"""From a SIGKILL of a worker to the end of the next step, against a bare worker's start and load.

    python -m benchmarks.recovery

Both sides train the tiny job on two processes, eager fp32. One is a `paceline train` whose rank 0 or 1 is killed once it has
a checkpoint: from the kill until the new attempt's first step is on record. The other is the hand-written loop as two plain
processes, with nobody above them: from their start until the end of the first step after they have loaded their state. They
take turns on an otherwise idle machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.launch import PROCS, environment, resolve
from benchmarks.pairs import bootstrap_median, first_goes_first
from benchmarks.program import finish, parser
from benchmarks.recipe import recipe_of
from benchmarks.record import ROOT, Figure, say
from benchmarks.startup import script
from paceline.data.prepare import prepare
from paceline.job.load import load_job, split_words
from paceline.run.records import read_records
from paceline.workers.processes import kill_all

TARGET_RATIO = 1.5
PAIRS = 12
LIMIT_SECONDS = 120.0
EVERY = 10
PARTS = ("seen", "started", "loaded", "stepped")
"""Seconds from the kill until: the fault is on record; new workers start; they have begun the run; a step is done."""

WORDS = [
    str(ROOT / "examples" / "tiny.toml"), "run.steps=100000", "data.eval_fraction=0", "parallel.precision=fp32",
    "parallel.compile=false", f"checkpoint.every={EVERY}", "data.workers=0", f"launch.procs_per_node={PROCS}",
]  # fmt: skip


class TookTooLong(Exception):
    """A side did not come so far in time."""


def recover(folder: Path, victim: int) -> dict[str, float]:
    """Seconds by part, from the kill of rank `victim` on."""
    runs = folder / "runs"
    name = f"run.name=r{len(list(runs.glob('*')))}"
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*script("paceline"), "train", *WORDS, f"run.dir={json.dumps(str(runs))}", name], cwd=ROOT,
            env=environment(), stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip
    try:
        run_dir = runs / name.partition("=")[2]
        _until(lambda: _first(run_dir, "checkpoint", state="durable"), log)
        _until(lambda: _first(run_dir, "step", step=EVERY + 3), log)
        killed = time.time()
        os.kill(_worker(process.pid, victim), signal.SIGKILL)
        step = _until(lambda: _first(run_dir, "step", attempt=2), log)
        times = {"seen": "fault", "started": "restart", "loaded": "run_started"}
        found = {part: _first(run_dir, kind, attempt=2 if part == "loaded" else 1) for part, kind in times.items()}
        return {part: one["time"] - killed for part, one in found.items() if one} | {"stepped": step["time"] - killed}
    finally:
        kill_all(process)


def start_bare(folder: Path, job: Path) -> dict[str, float]:
    """Seconds from the start of two plain processes until their first step is done."""
    told, state = folder / "bare.json", folder / "state.pt"
    told.unlink(missing_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": str(PROCS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.recovery_side", str(job), str(state), str(told)]
    began = time.time()
    ranks = [
        subprocess.Popen(command, cwd=ROOT, env={**environment(), **place, "RANK": str(rank)}) for rank in range(PROCS)
    ]
    try:
        if any(rank.wait(LIMIT_SECONDS) for rank in ranks):
            raise TookTooLong("a bare worker failed")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    found = json.loads(told.read_text(encoding="utf-8"))
    return {"loaded": found["began"] - began, "stepped": found["ended"] - began}


def measure(pairs: int) -> list[dict[str, dict[str, float]]]:
    """Both in turn; one of each first, unmeasured, so that files and caches are warm."""
    found: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name:
        folder = Path(name)
        job = folder / "job.pickle"
        job.write_bytes(pickle.dumps((recipe_of(resolve(WORDS)), prepare(load_job(*split_words(WORDS)).data).train)))
        for pair in range(-1, pairs):
            sides: dict[str, Callable[[], dict[str, float]]] = {
                "paceline": lambda pair=pair: recover(folder, pair % PROCS),  # type: ignore[misc]
                "bare": lambda: start_bare(folder, job),
            }
            order = list(sides) if first_goes_first(pair) else list(sides)[::-1]
            taken = {side: sides[side]() for side in order}
            if pair >= 0:
                found.append(taken)
                say(f"  pair {pair + 1}/{pairs}: {_shown(taken['paceline'])}; bare {_shown(taken['bare'])}")
    return found


def figures_of(found: list[dict[str, dict[str, float]]]) -> list[Figure]:
    ratio = bootstrap_median([pair["paceline"]["stepped"] / pair["bare"]["stepped"] for pair in found])
    seconds = {side: statistics.median(pair[side]["stepped"] for pair in found) for side in ("paceline", "bare")}
    parts = {part: statistics.median(pair["paceline"][part] for pair in found) for part in PARTS}
    return [
        Figure(
            "kill to first new step, over a bare start and load", f"<= {TARGET_RATIO:g}",
            f"{ratio}, {len(found)} pairs; {seconds['paceline']:.2f} / {seconds['bare']:.2f} s",
            ratio.median <= TARGET_RATIO,
        ),
        Figure("of which, in the median", "", _shown(parts)),
    ]  # fmt: skip


def _worker(supervisor: int, rank: int) -> int:
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    for child in map(int, children):
        with contextlib.suppress(OSError):
            if f"\0RANK={rank}\0".encode() in b"\0" + Path(f"/proc/{child}/environ").read_bytes():
                return child
    raise TookTooLong(f"rank {rank} is not there")


def _first(run_dir: Path, kind: str, **wanted: Any) -> dict[str, Any] | None:
    if not run_dir.exists():
        return None
    found = read_records(run_dir, kinds=(kind,))
    return next((r for r in found if all(r.get(key) == value for key, value in wanted.items())), None)


def _until(look: Callable[[], dict[str, Any] | None], log: Path) -> dict[str, Any]:
    deadline = time.monotonic() + LIMIT_SECONDS
    while (found := look()) is None:
        if time.monotonic() > deadline:
            raise TookTooLong(log.read_text(errors="replace")[-3000:])
        # Seldom: the machine is being measured.
        time.sleep(0.1)
    return found


def _shown(parts: dict[str, float]) -> str:
    return ", ".join(f"{part} {seconds:.2f} s" for part, seconds in parts.items())


def main() -> int:
    args = parser(__doc__).parse_args()
    found = measure(2 if args.quick else PAIRS)
    return finish("recovery", figures_of(found), {"pairs": found}, args, WORDS)


if __name__ == "__main__":
    sys.exit(main())

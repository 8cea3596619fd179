"""Runs the benchmarks one after the other and shows all figures in one table: `make bench`.

    python -m benchmarks.run [--only NAME ...] [--quick]

The machine should do nothing else meanwhile. Each program keeps its result in benchmarks/results/<date>-<name>.json.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.launch import environment
from benchmarks.record import RESULTS, ROOT, SCRATCH, Figure, load_figures, say, table

PROGRAMS = {
    "throughput": ["benchmarks.throughput"],
    "defaults": ["benchmarks.throughput", "--defaults"],
    "peers": ["benchmarks.peers"],
    "startup": ["benchmarks.startup"],
    "overhead": ["benchmarks.overhead"],
    "memory": ["benchmarks.memory"],
    "sharded_throughput": ["benchmarks.sharded_throughput"],
    "split_throughput": ["benchmarks.split_throughput"],
    "sharded_memory": ["benchmarks.sharded_memory"],
    "chunked-loss": ["benchmarks.chunked_loss"],
    "context_memory": ["benchmarks.context_memory"],
    "pipeline_bubble": ["benchmarks.pipeline_bubble"],
    "command_start": ["benchmarks.command_start"],
    "pulse_cost": ["benchmarks.pulse_cost"],
    "verdicts": ["benchmarks.verdicts", "--each", "3"],
    "plan_speed": ["benchmarks.plan_speed"],
    "checkpoint_save": ["benchmarks.checkpoint_save"],
    "bench_collectives": ["benchmarks.bench_collectives"],
    "netlab_rates": ["benchmarks.netlab_rates"],
    "plan_own_runs": ["benchmarks.plan_own_runs"],
    "plan_slow_link": ["benchmarks.plan_slow_link"],
}
LIMIT_SECONDS = 1200.0
BUSY_LOAD = 0.5


def run_program(name: str, quick: bool) -> list[Figure]:
    """One program in a process of its own; a program that fails gives a figure that says so."""
    output = (SCRATCH if quick else RESULTS) / f"{datetime.now(UTC):%Y-%m-%d}-{name}.json"
    command = [sys.executable, "-m", *PROGRAMS[name], "--output", str(output), *(["--quick"] if quick else [])]
    started = time.monotonic()
    say(f"== {name}")
    try:
        code = subprocess.run(command, cwd=ROOT, env=environment(), timeout=LIMIT_SECONDS, check=False).returncode
    except subprocess.TimeoutExpired:
        return [Figure(name, "", f"did not end within {LIMIT_SECONDS:.0f} s", False)]
    if code != 0 or not _is_new(output, started):
        return [Figure(name, "", f"failed with exit code {code}", False)]
    say(f"== {name}: {time.monotonic() - started:.0f} s")
    return load_figures(output)


def _is_new(path: Path, started: float) -> bool:
    return path.exists() and path.stat().st_mtime >= time.time() - (time.monotonic() - started) - 1.0


def warn_if_busy() -> None:
    load = os.getloadavg()[0]
    if load > BUSY_LOAD:
        say(f"the load average is {load:.1f}: other work on this machine makes the figures worthless")


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), help="these programs alone")
    options.add_argument("--quick", action="store_true", help="small sizes and few pairs: measures nothing")
    args = options.parse_args()
    warn_if_busy()
    found = {name: run_program(name, args.quick) for name in args.only}
    figures = [figure for rows in found.values() for figure in rows]
    print(table(figures))
    reached = sum(figure.reached is True for figure in figures)
    short = sum(figure.reached is False for figure in figures)
    print(f"{reached} reached, {short} short")
    return 1 if any("failed with exit code" in f.measured or "did not end" in f.measured for f in figures) else 0


if __name__ == "__main__":
    sys.exit(main())

"""What telemetry, progress and records cost, and how long a step waits for data, in a real run of the tiny job.

    python -m benchmarks.overhead

Overhead is thread time inside those blocks (`StepTimers.overhead`), summed by the run itself, and thread time of marks
and heartbeats, measured apart; the rank with most of it counts. Two ranks on two cores keep both busy.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.launch import run_ranks
from benchmarks.program import finish, parser
from benchmarks.record import ROOT, Figure, say
from paceline.units import format_percent

STEP_SECONDS = 0.050
OVERHEAD_TARGET, WAIT_TARGET = 0.01, 0.005


def overhead_figure(found: dict[str, Any]) -> Figure:
    spent = [(r["overhead_seconds_per_step"], r["marks_seconds_per_step"]) for r in found["ranks"]]
    blocks, marks = max(spent, key=sum)
    share = (blocks + marks) / STEP_SECONDS
    measured = (
        f"{share:.2%}: {blocks * 1e6:.0f} us records, line and exporters + {marks * 1e6:.0f} us marks and heartbeats"
    )
    return Figure(
        f"telemetry, progress and records in a step of {STEP_SECONDS * 1000:.0f} ms",
        f"< {OVERHEAD_TARGET:.0%}", measured, share < OVERHEAD_TARGET,
    )  # fmt: skip


def wait_figure(found: dict[str, Any]) -> Figure:
    share, rank = max((w["data_wait"] / w["seconds"], rank) for rank, w in enumerate(found["waits"]))
    later = [step["seconds"] for step in found["steps"][10:]]
    mean = sum(later) / len(later)
    measured = f"{format_percent(share)} of {mean * 1000:.0f} ms on rank {rank}, the one that waits longer"
    return Figure("data_wait, both cores busy", f"<= {WAIT_TARGET:.1%} of a step", measured, share <= WAIT_TARGET)


def main() -> int:
    args = parser(__doc__).parse_args()
    words = [str(ROOT / "examples" / "tiny.toml"), "run.log_every=10", "launch.threads=1"]
    steps = 30 if args.quick else 300
    say(f"{steps} steps of examples/tiny.toml")
    found = run_ranks("benchmarks.one_side", words, {"side": "paceline", "steps": steps})
    return finish("overhead", [overhead_figure(found), wait_figure(found)], found, args, words)


if __name__ == "__main__":
    sys.exit(main())

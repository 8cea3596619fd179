"""What being watched costs a rank: its beats, its pulse, the engine's record of its collectives, and an answer on request.

    python -m benchmarks.pulse_cost [--quick]

Beats and pulse are timed by themselves and set against the shortest step that anyone trains with; so is the answer, which
is given only where nothing moves. The engine keeps its record whether it is read or not.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.program import finish, parser
from benchmarks.record import Figure
from paceline.workers import heartbeat, pulse, recorder

STEP_SECONDS = 0.02
"""A step of a tiny model on two cores."""
BEATS_PER_STEP = 2
MOST_SHARE = 0.01


def seconds_of(call: Callable[[], object], times: int) -> float:
    """Median seconds of a call, over ten series."""
    series = []
    for _ in range(10):
        began = time.perf_counter()
        for _ in range(times):
            call()
        series.append((time.perf_counter() - began) / times)
    return statistics.median(series)


def work(iterations: int) -> float:
    """Seconds that fixed Python work takes: it holds the lock that a pulse needs."""
    began = time.perf_counter()
    for _ in range(iterations):
        sum(range(1000))
    return time.perf_counter() - began


def slowdown(folder: Path, pairs: int, iterations: int) -> float:
    """Median relative change of fixed work with a pulse beside it, over pairs in changing order."""
    changes = []
    for number in range(pairs):
        with_pulse = number % 2 == 0
        first = _timed(folder, with_pulse, iterations)
        second = _timed(folder, not with_pulse, iterations)
        beside, alone = (first, second) if with_pulse else (second, first)
        changes.append(beside / alone - 1)
    return statistics.median(changes)


def _timed(folder: Path, with_pulse: bool, iterations: int) -> float:
    if not with_pulse:
        return work(iterations)
    done = threading.Event()
    thread = threading.Thread(target=_pulse_until, args=(done, pulse.answer_path(folder, 0)))
    thread.start()
    try:
        return work(iterations)
    finally:
        done.set()
        thread.join()


def _pulse_until(done: threading.Event, path: Path) -> None:
    """As `pulse.start` does, with an end."""
    ticks = 0
    while not done.is_set():
        ticks += 1
        pulse.tick(path, ticks, 0)
        time.sleep(pulse.PERIOD_SECONDS)


def recorded(collectives: int) -> tuple[float, float]:
    """Seconds of a collective of one rank, and of reading what the engine has recorded of them."""
    import torch
    import torch.distributed as dist
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        tensor = torch.ones(16)
        each = seconds_of(lambda: dist.all_reduce(tensor), collectives)
        return each, seconds_of(recorder.seen, 3)
    finally:
        dist.destroy_process_group()


def main() -> int:
    options = parser(__doc__)
    args = options.parse_args()
    times = 200 if args.quick else 20_000
    with tempfile.TemporaryDirectory(prefix="paceline-pulse-") as name:
        folder = Path(name)
        heartbeat.open_file(folder / "rank-0.beat")
        beat = seconds_of(lambda: heartbeat.beat(7, "training step"), times)
        tick = seconds_of(lambda: pulse.tick(folder / "answer", 1, 0), times)
        changed = slowdown(folder, 4 if args.quick else 20, 5_000 if args.quick else 100_000)
        each, answer = recorded(20 if args.quick else 300)
    share = BEATS_PER_STEP * beat / STEP_SECONDS + tick / pulse.PERIOD_SECONDS
    figures = [
        Figure("a beat", "-", f"{beat * 1e6:.2f} us"),
        Figure("a stamp of the pulse", "-", f"{tick * 1e6:.2f} us"),
        Figure("both, of a step of 20 ms", f"< {MOST_SHARE:.0%}", f"{share:.3%}", share < MOST_SHARE),
        Figure("fixed work beside a pulse", f"< {MOST_SHARE:.0%}", f"{changed:+.3%}", changed < MOST_SHARE),
        Figure("a collective of one rank, recorded", "-", f"{each * 1e6:.1f} us"),
        Figure("reading 600 recorded collectives, on request", "-", f"{answer * 1e3:.2f} ms"),
    ]
    return finish("pulse_cost", figures, {"beat_seconds": beat, "tick_seconds": tick, "changed": changed}, args, [])


if __name__ == "__main__":
    sys.exit(main())

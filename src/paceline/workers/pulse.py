"""A thread beside a worker's main one: shows that the interpreter still runs, and tells on request what the rank waits in.

The main thread silent and the pulse alive: it is blocked outside of the interpreter's lock (a collective, a loader, a disk).
Both silent: something holds that lock, or the process does not run at all. Five wake-ups a second of some microseconds.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from paceline.workers import heartbeat, recorder
from paceline.workers.recorder import Seen

PERIOD_SECONDS = 0.2
_MAX_FRAMES = 60


class Answer(NamedTuple):
    """What a worker told on request: the Python stacks of its threads, the main one last, and its collectives."""

    stacks: str
    seen: Seen | None


def start(path: Path) -> None:
    """In a worker: stamp its page from now on, and answer requests into `path`."""
    threading.Thread(target=_run, args=(path,), name="paceline pulse", daemon=True).start()


def answer_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.answer.json"


def read_answer(path: Path) -> Answer | None:
    """The last answer, or None where there is none."""
    try:
        plain: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return Answer(plain["stacks"], recorder.seen_of(plain["seen"]))


def tick(path: Path, ticks: int, answered: int) -> int:
    """One wake-up, number `ticks`: stamp, and answer what is asked into `path`; the number of the last request answered."""
    asked = heartbeat.asked()
    if asked != answered:
        _answer(path)
    heartbeat.stamp(ticks, asked)
    return asked


def _run(path: Path) -> None:
    ticks = answered = 0
    while True:
        ticks += 1
        answered = tick(path, ticks, answered)
        time.sleep(PERIOD_SECONDS)


def _answer(path: Path) -> None:
    found = recorder.seen()
    plain = {"stacks": stacks(), "seen": found.to_plain() if found is not None else None}
    part = path.with_suffix(".part")
    try:
        part.write_text(json.dumps(plain), encoding="utf-8")
        part.replace(path)
    except OSError:
        # A full disk: the supervisor goes by what the system says of this process.
        return


def stacks() -> str:
    """The Python stacks of all threads but the caller's, in the words of `faulthandler`, the main thread last."""
    own, main = threading.get_ident(), threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] == main)
    return "\n\n".join(_stack(ident, frame) for ident, frame in frames if ident != own) + "\n"


def _stack(ident: int, frame: FrameType | None) -> str:
    lines = [f"Thread 0x{ident:016x} (most recent call first):"]
    while frame is not None and len(lines) <= _MAX_FRAMES:
        lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}')
        frame = frame.f_back
    return "\n".join(lines)

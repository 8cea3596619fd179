"""Where each worker is, for the supervisor to read: a small mapped file per rank, written in about a microsecond.

The supervisor compares the counts of the ranks: those behind did not arrive. No-op without a supervisor.
"""

from __future__ import annotations

import mmap
import struct
import time
from pathlib import Path
from typing import NamedTuple

_LAYOUT = struct.Struct("=QqddQ64sQ")
"""sequence, step, time (monotonic), silence allowed (seconds), count, phase, sequence again: unequal while written."""

WAITING = -1.0
"""As `allow_seconds`: this rank waits for others at a host barrier, so its silence says nothing."""

_PHASE_BYTES = 64
_pages: list[mmap.mmap] = []
_sequence = 0
_last: tuple[int, str] = (-1, "starting")


class Beat(NamedTuple):
    """The last sign of life of a rank. `time` is CLOCK_MONOTONIC, which the processes of one host share."""

    step: int
    phase: str
    time: float
    allow_seconds: float
    beats: int


def open_file(path: Path) -> None:
    """Make this process's beats go to `path`."""
    path.write_bytes(bytes(_LAYOUT.size))
    with path.open("r+b") as file:
        _pages[:] = [mmap.mmap(file.fileno(), _LAYOUT.size)]


def beat(step: int, phase: str, allow_seconds: float = 0.0) -> None:
    """Say that this rank enters `phase` of `step` (-1 before the first).

    Args:
        phase: what it does, in words fit for a message: "reducing gradients".
        allow_seconds: silence that is no stall after this beat, for long phases such as compilation; or `WAITING`.
    """
    global _sequence, _last
    _last = (step, phase)
    if not _pages:
        return
    _sequence += 1
    phase_bytes = phase.encode()[:_PHASE_BYTES]
    _LAYOUT.pack_into(_pages[0], 0, _sequence, step, time.monotonic(), allow_seconds, _sequence, phase_bytes, _sequence)


def last() -> tuple[int, str]:
    """Step and phase of this process's own last beat."""
    return _last


def read(path: Path) -> Beat | None:
    """The last beat in `path`, or None where there is none yet."""
    for _ in range(20):
        try:
            data = path.read_bytes()
        except OSError:
            return None
        if len(data) != _LAYOUT.size:
            return None
        first, step, when, allow, count, phase, second = _LAYOUT.unpack(data)
        if first == second:
            return Beat(step, phase.rstrip(b"\0").decode(errors="replace"), when, allow, count) if first else None
    return None

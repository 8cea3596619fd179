"""Where each worker is, for the supervisor to read: a small mapped file per rank, written in about a microsecond.

The page holds the last beat of the main thread, the pulse of a thread beside it (`pulse`), what the supervisor asks of that
thread, and how long each section has taken (`durations`). No-op without a supervisor.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from paceline.workers import durations
from paceline.workers.durations import SECTIONS, Durations, Section

_LAYOUT = struct.Struct("=QqddQB64sQ")
"""Sequence, step, time (monotonic), silence allowed (seconds), count, section, phase, sequence again: equal when whole."""
# Aligned and in the machine's own sizes: each of these is written at once.
_PULSE = struct.Struct("@QdQ")
_REQUEST = struct.Struct("@Q")
_PULSE_AT, _REQUEST_AT, _DURATIONS_AT = 128, 192, 256
_PAGE_BYTES = _DURATIONS_AT + durations.SIZE_BYTES

WAITING = -1.0
"""As `allow_seconds`: this rank waits for others at a host barrier, so its silence says nothing."""

FIRST_STEPS = 3
"""The first steps of a process count as `compile`: they build kernels and buckets, and say nothing of the ones after."""

_PHASE_BYTES = 64
_INDEX = {section: index for index, section in enumerate(SECTIONS)}
_COMPILE = _INDEX["compile"]
_STEP = _INDEX["step"]
_pages: list[mmap.mmap] = []
_sequence = 0
_last: tuple[int, str, float, Section | None] = (-1, "starting", 0.0, None)
_began: tuple[int, float] | None = None
"""Index of the section that lasts, and since when; None while others are waited for."""
_first_step: int | None = None


class Beat(NamedTuple):
    """The last sign of life of a rank. `time` is CLOCK_MONOTONIC, which the processes of one host share."""

    step: int
    phase: str
    time: float
    allow_seconds: float
    beats: int
    section: Section = "step"


class Pulse(NamedTuple):
    """Of the thread beside the main one: how often it woke, when last (CLOCK_MONOTONIC), and the last request it answered."""

    ticks: int
    time: float
    answered: int


class Page(NamedTuple):
    """All that a worker's file says."""

    beat: Beat | None
    pulse: Pulse | None
    durations: dict[Section, Durations]


def open_file(path: Path) -> None:
    """Make this process's beats go to `path`."""
    global _sequence, _began, _first_step
    path.write_bytes(bytes(_PAGE_BYTES))
    with path.open("r+b") as file:
        _pages[:] = [mmap.mmap(file.fileno(), _PAGE_BYTES)]
    _sequence, _began, _first_step = 0, None, None


def beat(step: int, phase: str, allow_seconds: float = 0.0, section: Section | None = None) -> None:
    """Say that this rank enters `phase` of `step` (-1 before the first).

    Args:
        phase: what it does, in words fit for a message: "reducing gradients".
        allow_seconds: silence that is no stall after this beat, for long phases such as a save; or `WAITING`.
        section: whose limit holds; `start` before the first step and `step` from then on unless given.
    """
    global _sequence, _last, _began
    _last = (step, phase, allow_seconds, section)
    if not _pages:
        return
    page, now = _pages[0], time.monotonic()
    if _began is not None:
        durations.count(page, _DURATIONS_AT, _began[0], now - _began[1])
    index = _section_of(step, section)
    _began = None if allow_seconds == WAITING else (index, now)
    _sequence += 1
    phase_bytes = phase.encode()[:_PHASE_BYTES]
    _LAYOUT.pack_into(page, 0, _sequence, step, now, allow_seconds, _sequence, index, phase_bytes, _sequence)


def waiting(phase: str, allow_seconds: float = WAITING) -> contextlib.AbstractContextManager[None]:
    """Inside, this rank waits for others on the host, or as long as is allowed; after it, it is where it was before."""
    return within(phase, allow_seconds)


@contextlib.contextmanager
def within(phase: str, allow_seconds: float = 0.0, section: Section | None = None) -> Iterator[None]:
    """Inside, this rank is in `phase` of its step, in the same section unless given; after it, where it was before."""
    step, before, allow, usual = _last
    beat(step, phase, allow_seconds, section or usual)
    try:
        yield
    finally:
        beat(step, before, allow, usual)


def last() -> tuple[int, str]:
    """Step and phase of this process's own last beat."""
    return _last[:2]


def stamp(ticks: int, answered: int) -> None:
    """In a worker's pulse thread: it lives."""
    if _pages:
        _PULSE.pack_into(_pages[0], _PULSE_AT, ticks, time.monotonic(), answered)


def asked() -> int:
    """In a worker's pulse thread: the number of the supervisor's last request."""
    return int(_REQUEST.unpack_from(_pages[0], _REQUEST_AT)[0]) if _pages else 0


def ask(path: Path, number: int) -> None:
    """In the supervisor: request number `number` (from 1 on) of the worker whose file this is."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_WRONLY)
        try:
            os.pwrite(handle, _REQUEST.pack(number), _REQUEST_AT)
        finally:
            os.close(handle)


def read(path: Path) -> Beat | None:
    """The last beat in `path`, or None where there is none yet."""
    page = read_page(path)
    return page.beat if page is not None else None


def read_page(path: Path) -> Page | None:
    """All of `path`, or None where there is no such file yet."""
    for _ in range(20):
        try:
            data = path.read_bytes()
        except OSError:
            return None
        if len(data) != _PAGE_BYTES:
            return None
        first, step, when, allow, count, index, phase, second = _LAYOUT.unpack_from(data)
        if first == second:
            words = phase.rstrip(b"\0").decode(errors="replace")
            beat = Beat(step, words, when, allow, count, SECTIONS[index]) if first else None
            pulse = Pulse(*_PULSE.unpack_from(data, _PULSE_AT))
            return Page(beat, pulse if pulse.ticks else None, durations.read(data, _DURATIONS_AT))
    return None


def _section_of(step: int, section: Section | None) -> int:
    """Index of the section that a beat enters."""
    global _first_step
    index = _INDEX[section or ("start" if step < 0 else "step")]
    if index != _STEP:
        return index
    if _first_step is None:
        _first_step = step
    return _COMPILE if step - _first_step < FIRST_STEPS else _STEP

"""The Python stacks of workers on request: works while the interpreter is blocked in native code or in a collective."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from paceline.workers.processes import stat_fields

# Schedulers use SIGUSR1 and SIGUSR2 as notices of preemption; nobody uses this one.
STACK_SIGNAL = signal.SIGRTMIN + 7 if sys.platform == "linux" else signal.SIGUSR2

_STATES = {"T": "stopped", "t": "stopped by a debugger", "D": "waiting for a disk or a device", "Z": "ended"}
_files: list[IO[str]] = []


def listen(path: Path) -> None:
    """In a worker: write the stacks of all threads to `path` whenever `STACK_SIGNAL` comes."""
    _files[:] = [path.open("w")]
    faulthandler.register(STACK_SIGNAL, file=_files[0], all_threads=True)


def collect(pids: Mapping[int, int], folder: Path, timeout: float = 1.0) -> dict[int, str]:
    """Stacks of live workers by rank.

    Args:
        pids: process id by rank, of workers that `listen`.
        timeout: seconds that all of them together have. A stopped process prints nothing: its state is given instead.
    """
    for rank, pid in pids.items():
        os.truncate(stacks_path(folder, rank), 0)
        _send(pid)
    deadline = time.monotonic() + timeout
    texts: dict[int, str] = {}
    while len(texts) < len(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
        texts = {r: t for r in pids if (t := stacks_path(folder, r).read_text(errors="replace").strip("\0"))}
    return {rank: texts.get(rank) or f"no stack: the process is {state(pid)}\n" for rank, pid in pids.items()}


def stacks_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.stacks"


def listen_as_helper(folder: Path) -> None:
    """In a process that a worker has started: as `listen`, in a file of its own."""
    path = helper_path(folder, os.getpid())
    part = path.with_suffix(".part")
    listen(part)
    # Seen under its name only once the signal is listened for: it would end the process before.
    part.replace(path)


def helper_path(folder: Path, pid: int) -> Path:
    return folder / f"helper-{pid}.stacks"


def main_thread(stacks: str) -> str:
    """The part of a dump that shows the main thread, which `faulthandler` prints last."""
    return stacks.strip().split("\n\n")[-1]


def state(pid: int) -> str:
    """`stopped`, `waiting for a disk or a device`, `alive`, or `gone`."""
    fields = stat_fields(pid)
    if not fields:
        return "gone" if sys.platform == "linux" else "alive"
    return _STATES.get(fields[0], "alive")


def _send(pid: int) -> None:
    try:
        os.kill(pid, STACK_SIGNAL)
    except ProcessLookupError:
        return

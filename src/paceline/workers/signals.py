"""Signals: what a death by one usually means, and which ask a run to stop."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator

NOTICES = (signal.SIGUSR1, signal.SIGUSR2) if sys.platform == "linux" else (signal.SIGUSR1,)
"""How schedulers tell of a preemption that is still to come; elsewhere than on Linux the second one prints stacks."""

STOPPING = (signal.SIGINT, signal.SIGTERM, *NOTICES)
"""Signals that ask a run to stop."""

_MEANING = {
    signal.SIGKILL: "killed from outside, likely out of memory",
    signal.SIGBUS: "bus error, likely too little shared memory (/dev/shm) or a truncated mapped file",
    signal.SIGSEGV: "segmentation fault in native code",
    signal.SIGABRT: "aborted by native code",
    signal.SIGILL: "illegal instruction: a binary built for another processor",
    signal.SIGFPE: "arithmetic error in native code",
    signal.SIGTERM: "asked to stop from outside",
    signal.SIGINT: "interrupted from outside",
    signal.SIGXCPU: "CPU time limit reached",
}


def signal_reason(number: int) -> str:
    """`signal 9 (SIGKILL): killed from outside, likely out of memory`."""
    try:
        known = signal.Signals(number)
    except ValueError:
        return f"signal {number}"
    meaning = _MEANING.get(known)
    return f"signal {number} ({known.name})" + (f": {meaning}" if meaning else "")


def signal_name(number: int) -> str:
    """`SIGTERM`; for SIGINT what a person did."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """A helper process that is started in here hears no request to stop until it calls `disregard`.

    A scheduler signals every process of a step, and the helper must not die between its start and its first line.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def disregard() -> None:
    """In a helper process: its rank alone decides when it stops."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)

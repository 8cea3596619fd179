"""What a death by signal usually means."""

from __future__ import annotations

import signal

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

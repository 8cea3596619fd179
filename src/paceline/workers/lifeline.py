"""A process that must not outlive the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int, signal_number: int = signal.SIGKILL) -> None:
    """Have the kernel send `signal_number` to this process when its parent goes; leave now if it has gone already.

    The kernel watches the *thread* that forked, so the parent must fork from one that lives as long as it does. Without
    Linux only the check at the start is made.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal_number, 0, 0, 0)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal_number)

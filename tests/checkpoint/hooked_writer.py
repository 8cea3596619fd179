"""A writer process that is slow, that fails, or that is killed, at operations of its storage.

python hooked_writer.py slow SECONDS [TEXT] -- ARGS...   sleeps before each write (into paths with this text)
python hooked_writer.py kill OPERATION N -- ARGS...      kills itself at the N-th operation of this kind
python hooked_writer.py fail-odd -- ARGS...              finds no space in each odd save, later each time
python hooked_writer.py limit BYTES -- ARGS...           may write no file longer than that
"""

from __future__ import annotations

import errno
import itertools
import os
import resource
import signal
import sys
import time

from paceline.checkpoint import storage, writer


def main() -> None:
    split = sys.argv.index("--")
    kind, *values = sys.argv[1:split]
    sys.argv[1:] = sys.argv[split + 1 :]
    {"slow": slow, "kill": kill, "fail-odd": fail_odd, "fail-rank": fail_rank, "limit": limit}[kind](*values)
    writer.main()


def slow(seconds: str, text: str = "") -> None:
    def hook(operation: str, path: str) -> None:
        if operation == "write" and text in path:
            time.sleep(float(seconds))

    storage.on_operation = hook


def kill(kind: str, number: str) -> None:
    counts = itertools.count(1)

    def hook(operation: str, path: str) -> None:
        if operation == kind and next(counts) == int(number):
            os.kill(os.getpid(), signal.SIGKILL)

    storage.on_operation = hook


def fail_odd() -> None:
    saves = itertools.count()
    state = {"save": 0, "left": 0}

    def hook(operation: str, path: str) -> None:
        if operation == "mkdir" and "step-" in path:
            state["save"] = next(saves)
            state["left"] = state["save"] // 2 % 12 + 1
        if operation in ("create", "write", "sync", "rename") and state["save"] % 2:
            state["left"] -= 1
            if state["left"] == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    storage.on_operation = hook


def fail_rank(rank: str) -> None:
    def hook(operation: str, path: str) -> None:
        if operation == "write" and f"rank-{int(rank):05d}" in path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    storage.on_operation = hook


def limit(size: str) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(size), int(size)))


if __name__ == "__main__":
    main()

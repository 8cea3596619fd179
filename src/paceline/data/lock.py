"""One builder per file system; the others wait for it, for as long as it moves. Imports no numpy and no torch."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.errors import DataError
from paceline.units import format_seconds

STANDSTILL_SECONDS = 1800.0
"""A builder that has not moved for this long is given up."""

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
_POLL_SECONDS = 0.05
_BEAT_SECONDS = 1.0


@contextmanager
def builder_lock(
    path: Path, waiting: Callable[[str], None], standstill_seconds: float = STANDSTILL_SECONDS
) -> Iterator[Callable[[], None]]:
    """Be the only builder; yields a function to call while there is progress.

    The kernel frees the lock of a builder that dies. On a file system without locks every process builds: the files are
    equal and renamed into place whole, so the last one wins without harm.

    Args:
        path: the lock file.
        waiting: told once who is waited for.
        standstill_seconds: how long the builder may go without a sign of progress.

    Raises:
        DataError: the builder stands still.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _acquire(handle, path, waiting, standstill_seconds)
        beat = _Beat(handle)
        yield beat
    finally:
        os.close(handle)


class _Beat:
    """Writes who builds into the lock file, at most once a second; its time of change is the sign of progress."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._last = 0.0
        self()

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self._last < _BEAT_SECONDS and self._last:
            return
        self._last = now
        text = f"process {os.getpid()} on {socket.gethostname()}".encode()
        os.pwrite(self._handle, text, 0)
        os.ftruncate(self._handle, len(text))
        os.utime(self._handle)


def _acquire(handle: int, path: Path, waiting: Callable[[str], None], standstill_seconds: float) -> None:
    seen, since, told = -1, time.monotonic(), False
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR):
                raise
        moved = os.fstat(handle).st_mtime_ns
        if moved != seen:
            seen, since = moved, time.monotonic()
        builder = os.pread(handle, 200, 0).decode(errors="replace") or "another process"
        if not told:
            waiting(builder)
            told = True
        if time.monotonic() - since > standstill_seconds:
            raise DataError(
                f"{builder} holds {path} and has made no progress for {format_seconds(standstill_seconds)}",
                key="data.cache_dir",
                values={"lock": str(path), "builder": builder},
                hint="End that process, then run the command again.",
            )
        time.sleep(_POLL_SECONDS)

"""One writer process per host and place: a lock that the kernel frees when its holder ends. No torch.

A writer outlives its ranks while it finishes a save. The next attempt waits for it, so that it finds that save whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from paceline.errors import PacelineError
from paceline.units import format_seconds

PAUSE_SECONDS = 0.05


def lock_path(place: str, node: int) -> Path:
    """The lock file of the writer of host number `node`: in the place itself, or on this host for an object store."""
    return _folder(place) / f"{_stem(place)}{node}.lock"


def take_now(place: str, node: int) -> int | None:
    """The lock as an open file, to be handed to a writer that is about to start; None where it cannot be had at once.

    Held before the writer runs, it leaves no moment in which a later attempt could miss a writer that has yet to begin.
    """
    try:
        handle = _open(place, node)
    except OSError:
        return None  # the writer meets the same reason, and says it
    if _locked(handle):
        return handle
    os.close(handle)
    return None


def take(place: str, node: int, timeout: float) -> int:
    """Take the lock for this process and keep it until it ends; returns the open file.

    Raises:
        PacelineError: another writer held it for `timeout` seconds.
        OSError: the lock file cannot be made.
    """
    handle = _open(place, node)
    deadline = time.monotonic() + timeout
    while not _locked(handle):
        if time.monotonic() > deadline:
            os.close(handle)
            raise _still_there(lock_path(place, node), timeout)
        time.sleep(PAUSE_SECONDS)
    name_holder(handle, os.getpid())
    return handle


def name_holder(handle: int, pid: int) -> None:
    """Write into the lock file who holds it, for messages."""
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"{pid} {os.uname().nodename}\n".encode(), 0)


def wait_for_old_writer(place: str, timeout: float, say: Callable[[str], None]) -> None:
    """Return once no writer of an earlier attempt works in the place. Call it before this attempt's first writer starts.

    Args:
        say: takes a line if there is something to wait for.

    Raises:
        PacelineError: it was still there after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    for path in sorted(_folder(place).glob(f"{_stem(place)}*.lock")):
        with contextlib.suppress(FileNotFoundError):
            _wait_for(path, deadline, timeout, say)


def _open(place: str, node: int) -> int:
    path = lock_path(place, node)
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)


def _wait_for(path: Path, deadline: float, timeout: float, say: Callable[[str], None]) -> None:
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        said = False
        while not _locked(handle):
            if not said:
                say(f"waiting for {_holder(path)} of an earlier attempt to finish its save")
                said = True
            if time.monotonic() > deadline:
                raise _still_there(path, timeout)
            time.sleep(PAUSE_SECONDS)
    finally:
        os.close(handle)


def _locked(handle: int) -> bool:
    """Whether the lock is ours now. A file system without locks gives no protection, and no reason to wait."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _still_there(path: Path, timeout: float) -> PacelineError:
    return PacelineError(
        f"{_holder(path)} of an earlier attempt still holds {path} after {format_seconds(timeout)}",
        key="checkpoint.storage_timeout",
        values={"path": str(path), "seconds": timeout},
        hint="It ends by itself once its save is done; end it with kill if the storage hangs.",
    )


def _holder(path: Path) -> str:
    words = path.read_text(encoding="utf-8").split()
    return f"the checkpoint writer (pid {words[0]} on {words[1]})" if len(words) == 2 else "the checkpoint writer"


def _is_url(place: str) -> bool:
    return "://" in place and not place.startswith("file://")


def _folder(place: str) -> Path:
    if _is_url(place):
        return Path(tempfile.gettempdir()) / f"paceline-writers-{os.getuid()}"
    return Path(place.removeprefix("file://"))


def _stem(place: str) -> str:
    return f"{hashlib.sha256(place.encode()).hexdigest()[:16]}-" if _is_url(place) else ".writer-"

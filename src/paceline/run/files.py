"""Writing files so that a kill, a power cut or a full disk leaves the old content or the new one, never half of it.

Every command starts with this module: it loads neither `tempfile` nor `shutil`, which cost as much as Python's start.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from paceline.errors import DiskFull
from paceline.units import format_bytes

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def is_no_space(error: OSError) -> bool:
    """Whether the error says that the disk, a quota or a file size limit is exhausted."""
    return error.errno in _NO_SPACE


def disk_full(folder: Path, needed_bytes: int, error: OSError) -> DiskFull:
    """The error for a write of `needed_bytes` into `folder` that found no space."""
    free = _free_bytes(folder)
    left = "an unknown amount" if free is None else format_bytes(free)
    return DiskFull(
        f"no space to write {format_bytes(needed_bytes)} into {folder}: {error.strerror} ({left} free)",
        key="run.dir",
        values={"folder": str(folder), "needed_bytes": needed_bytes, "free_bytes": free, "errno": error.errno},
        hint="Free space there or point run.dir at another disk, then give the same command again.",
    )


@contextlib.contextmanager
def space_checked(folder: Path, needed_bytes: int = 0) -> Iterator[None]:
    """Turn "no space left", "quota exceeded" and "file too large" into DiskFull naming `folder`."""
    try:
        yield
    except OSError as error:
        if is_no_space(error):
            raise disk_full(folder, needed_bytes, error) from None
        raise


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write a whole file: a temporary one beside it, fsync, rename, fsync of the folder.

    Raises:
        DiskFull: no space; the old file stands as it was and the temporary one is gone.
    """
    content = data.encode() if isinstance(data, str) else data
    with space_checked(path.parent, len(content)):
        temporary = path.with_name(f".{path.name}.{os.urandom(6).hex()}.tmp")
        try:
            with temporary.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames and creations inside the folder survive a power cut, where the file system can."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)


def _free_bytes(folder: Path) -> int | None:
    try:
        volume = os.statvfs(folder)
    except OSError:
        return None
    return volume.f_bavail * volume.f_frsize

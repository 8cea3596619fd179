"""Checkpoints in a folder: every file is synced before its name counts, every folder after it changed. No torch."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator

from paceline.checkpoint.storage import READ_SLICE_BYTES, Entry, Kind, announce, checked_name
from paceline.checkpoint.storage_write import write_parts
from paceline.errors import JobError, NoCheckpoint, PacelineError

_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_REMOVE_FIRST = ("COMMIT", "manifest.json")


class LocalStorage:
    """Files under `root` of this machine's file systems; see `storage.Storage` for what each method does.

    A symbolic link inside the place that leads out of it is refused: NoCheckpoint where it would be read, JobError where
    it would be written through. The place itself may be a link.
    """

    is_remote = False

    def __init__(self, place: str) -> None:
        self.place = place
        self.root = os.path.realpath(place.removeprefix("file://"))
        self._identity: tuple[int, int] | None = None

    def exists(self, name: str) -> bool:
        return self.kind(name) is not None

    def kind(self, name: str) -> Kind | None:
        path = self._join(name)
        if name and os.path.islink(path):  # noqa: PTH114
            return "link"
        if os.path.isdir(path):  # noqa: PTH112
            return "folder"
        return "file" if os.path.exists(path) else None  # noqa: PTH110

    def size(self, name: str) -> int | None:
        path = self._path(name)
        try:
            return os.stat(path).st_size if os.path.isfile(path) else None  # noqa: PTH113, PTH116
        except FileNotFoundError:
            return None

    def names(self, folder: str = "") -> list[str]:
        try:
            return sorted(os.listdir(self._path(folder)))  # noqa: PTH208
        except FileNotFoundError:
            return []

    def entries(self, folder: str = "") -> dict[str, Entry]:
        try:
            with os.scandir(self._path(folder)) as found:
                return {entry.name: _entry(entry) for entry in sorted(found, key=lambda entry: entry.name)}
        except FileNotFoundError:
            return {}

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        handle = os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(handle).st_size
            end = size if end is None else min(end, size)
            if end - begin <= READ_SLICE_BYTES:
                data = os.pread(handle, max(0, end - begin), begin)
                if len(data) >= end - begin:
                    return data
            return b"".join(_read_slices(handle, begin, end))
        finally:
            os.close(handle)

    def write(self, name: str, parts: Iterable[bytes | bytearray | memoryview], size: int) -> None:
        path = self._writable(name)
        announce("create", path)
        handle = os.open(path, _NEW_FILE, 0o666)
        try:
            try:
                written = write_parts(handle, path, parts)
                if written != size:
                    raise ValueError(f"{path}: {written} bytes were given, {size} announced")
                announce("sync", path)
                os.fsync(handle)
            finally:
                os.close(handle)
        except Exception:
            with contextlib.suppress(OSError, PacelineError):
                self.remove(name)  # half a file takes the room that the next save needs
            raise

    def commit(self, name: str, data: bytes) -> None:
        path, temporary = self._writable(name), self._writable(f"{name}.tmp")
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        self.write(f"{name}.tmp", [data], len(data))
        announce("rename", path)
        os.rename(temporary, path)  # noqa: PTH104
        folder = name.rpartition("/")[0]
        self.sync_folder(folder)
        if folder:
            self.sync_folder(folder.rpartition("/")[0])

    def make_folder(self, name: str) -> None:
        path = self._writable(name) if name else self.root
        if os.path.isdir(path):  # noqa: PTH112
            return
        if not name:
            self._check_mounted()
            announce("mkdir", path)
            os.makedirs(path, exist_ok=True)  # noqa: PTH103
            self._check_mounted()
            _sync_folder(os.path.dirname(path))  # noqa: PTH120
            return
        announce("mkdir", path)
        os.mkdir(path)  # noqa: PTH102
        self.sync_folder(name.rpartition("/")[0])

    def sync_folder(self, name: str) -> None:
        _sync_folder(self._writable(name))

    def remove(self, name: str) -> None:
        folder, _, last = checked_name(name).rpartition("/")
        self._unlink(f"{self._writable(folder)}/{last}")  # a link goes itself, not what it leads to

    def remove_folder(self, name: str) -> None:
        if self.kind(name) == "link":
            self.remove(name)
            return
        path = self._writable(name)
        for first in _REMOVE_FIRST:
            if os.path.lexists(f"{path}/{first}"):
                self._unlink(f"{path}/{first}")
                _sync_folder(path)
        self._remove_tree(path)
        self.sync_folder(name.rpartition("/")[0])

    def move_folder(self, old: str, new: str) -> None:
        source, target = self._writable(old), self._writable(new)
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
        announce("rename", target)
        os.rename(source, target)  # noqa: PTH104
        for name in {old.rpartition("/")[0], new.rpartition("/")[0]}:
            self.sync_folder(name)

    def free_bytes(self) -> int | None:
        volume = self._volume()
        return volume.f_bavail * volume.f_frsize if volume else None

    def free_files(self) -> int | None:
        volume = self._volume()
        return volume.f_favail if volume and volume.f_files else None

    def is_mounted(self) -> bool:
        """Whether the place is still the folder that this storage began with."""
        try:
            self._check_mounted()
        except OSError as error:
            return error.errno != errno.ENODEV
        return True

    def _join(self, name: str) -> str:
        return f"{self.root}/{checked_name(name)}" if name else self.root

    def _path(self, name: str, wrong: type[PacelineError] = NoCheckpoint) -> str:
        path = self._join(name)
        real = os.path.realpath(path)
        if real != self.root and not real.startswith(self.root.rstrip("/") + "/"):
            raise wrong(
                f"{self.place}/{name} leads out of {self.place} by a symbolic link, to {real}",
                values={"link": path, "target": real, "place": self.place},
                hint="Replace the link by the file itself.",
            )
        return path

    def _writable(self, name: str) -> str:
        self._check_mounted()
        return self._path(name, JobError)

    def _check_mounted(self) -> None:
        """Refuse to write where another file system has taken the place of the one that was there.

        A new device with another inode is the bare mount point; with the same inode it is the same thing mounted again.
        """
        try:
            found = os.stat(self.root)  # noqa: PTH116
        except FileNotFoundError:
            if self._identity is None:
                return
            raise OSError(errno.ENODEV, "the folder is no longer there", self.root) from None
        if self._identity and found.st_dev != self._identity[0] and found.st_ino != self._identity[1]:
            raise OSError(errno.ENODEV, "its file system is no longer mounted", self.root)
        self._identity = (found.st_dev, found.st_ino)

    def _volume(self) -> os.statvfs_result | None:
        path = self.root
        while not os.path.exists(path):  # noqa: PTH110
            path = os.path.dirname(path)  # noqa: PTH120
        try:
            return os.statvfs(path)
        except OSError:
            return None

    def _unlink(self, path: str) -> None:
        announce("unlink", path)
        os.unlink(path)  # noqa: PTH108

    def _remove_tree(self, path: str) -> None:
        with os.scandir(path) as entries:
            children = sorted((entry.path, entry.is_dir(follow_symlinks=False)) for entry in entries)
        for child, is_folder in children:
            self._remove_tree(child) if is_folder else self._unlink(child)
        announce("unlink", path)
        os.rmdir(path)  # noqa: PTH106


def _entry(found: os.DirEntry[str]) -> Entry:
    if found.is_symlink():
        return Entry("link", 0)
    if found.is_dir():
        return Entry("folder", 0)
    return Entry("file", found.stat(follow_symlinks=False).st_size)


def _read_slices(handle: int, begin: int, end: int) -> Iterator[bytes]:
    while begin < end:
        data = os.pread(handle, min(READ_SLICE_BYTES, end - begin), begin)
        if not data:
            return
        yield data
        begin += len(data)


def _sync_folder(path: str) -> None:
    announce("sync", path)
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that cannot sync a folder
            raise
    finally:
        os.close(handle)

"""Checkpoints in an object store, through fsspec: objects in order, the mark last. No torch.

Which store, and with what credentials, is said the way users of that store do it: by its environment and files. For S3:
AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE), AWS_DEFAULT_REGION, and AWS_ENDPOINT_URL for a store that is
not Amazon's; or `s3.json` in ~/.config/fsspec. Nothing of it stands in a job. `s3://` needs `pip install 'paceline[s3]'`.

An object appears whole or not at all: a small one is put in one request, a large one as an upload in parts that is
completed at its end and abandoned where anything fails.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable
from typing import Any

import fsspec

from paceline.checkpoint.storage import WRITE_SLICE_BYTES, Entry, Kind, announce, checked_name, slices
from paceline.errors import JobError

ONE_PUT_BYTES = 64 * 2**20
"""A larger object is sent in parts of this size, so that no whole copy of it is made here."""
MOST_PARTS = 9_000  # S3 takes 10,000
_EXTRAS = {"s3": "s3", "s3a": "s3"}


class ObjectStorage:
    """Objects under a URL; see `storage.Storage` for what each method does. Folders are prefixes: making one does nothing."""

    is_remote = True

    def __init__(self, place: str) -> None:
        self.place = place
        self._files, self._root = _open(place)

    def exists(self, name: str) -> bool:
        return self.kind(name) is not None

    def kind(self, name: str) -> Kind | None:
        info = self._info(name)
        return None if info is None else "folder" if info["type"] == "directory" else "file"

    def size(self, name: str) -> int | None:
        info = self._info(name)
        return int(info["size"]) if info is not None and info["type"] == "file" else None

    def names(self, folder: str = "") -> list[str]:
        return list(self.entries(folder))

    def entries(self, folder: str = "") -> dict[str, Entry]:
        path = self._path(folder)
        self._files.invalidate_cache()
        try:
            found = self._files.ls(path, detail=True)
        except FileNotFoundError:
            return {}
        infos = {info["name"].rstrip("/").rpartition("/")[2]: info for info in found if not _same(info["name"], path)}
        return {name: _entry(infos[name]) for name in sorted(infos)}

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        if end is not None and end <= begin:
            return b""
        is_whole = begin == 0 and end is None
        try:
            data = self._files.cat_file(self._path(name), **({} if is_whole else {"start": begin, "end": end}))
        except Exception:
            size = self.size(name)
            if size is not None and begin >= size:  # to some stores this is an error
                return b""
            if size is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{self.place}/{name}") from None
            raise
        return bytes(data)

    def write(self, name: str, parts: Iterable[bytes | bytearray | memoryview], size: int) -> None:
        path = self._path(name)
        if self._info(name) is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), f"{self.place}/{name}")
        announce("create", path)
        if size <= ONE_PUT_BYTES:
            self._put(path, parts, size)
        else:
            self._put_in_parts(path, parts, size)

    def commit(self, name: str, data: bytes) -> None:
        self.write(name, [data], len(data))

    def make_folder(self, name: str) -> None:
        self._path(name)

    def sync_folder(self, name: str) -> None:
        self._path(name)

    def remove(self, name: str) -> None:
        path = self._path(name)
        announce("unlink", path)
        self._files.rm_file(path)

    def remove_folder(self, name: str) -> None:
        files = self._all_files(name)
        for file in sorted(files, key=_mark_first):
            announce("unlink", file)
            self._files.rm_file(file)

    def move_folder(self, old: str, new: str) -> None:
        source, target = self._path(old), self._path(new)
        if self.names(new):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), f"{self.place}/{new}")
        for file in self._all_files(old):
            announce("rename", file)
            self._files.cp_file(file, target + file[len(source) :])
        self.remove_folder(old)

    def free_bytes(self) -> int | None:
        return None

    def free_files(self) -> int | None:
        return None

    def _path(self, name: str) -> str:
        return f"{self._root}/{checked_name(name)}" if name else self._root

    def _info(self, name: str) -> dict[str, Any] | None:
        path = self._path(name)
        self._files.invalidate_cache()  # another process writes here too
        try:
            info: dict[str, Any] = self._files.info(path)
        except FileNotFoundError:
            return None
        return info

    def _all_files(self, name: str) -> list[str]:
        self._files.invalidate_cache()
        root = self._path(name)
        found = [str(file) for file in self._files.find(root)]
        return sorted("/" + file.lstrip("/") if root.startswith("/") else file for file in found)

    def _put(self, path: str, parts: Iterable[bytes | bytearray | memoryview], size: int) -> None:
        data = b"".join(parts)
        if len(data) != size:
            raise ValueError(f"{path}: {len(data)} bytes were given, {size} announced")
        announce("write", path)
        self._files.pipe_file(path, data)

    def _put_in_parts(self, path: str, parts: Iterable[bytes | bytearray | memoryview], size: int) -> None:
        part_bytes = max(ONE_PUT_BYTES, -(-size // MOST_PARTS))
        file = self._files.open(path, "wb", block_size=part_bytes)
        try:
            written = 0
            for part in parts:
                for view in slices(part, WRITE_SLICE_BYTES):
                    announce("write", path)
                    file.write(view)
                    written += len(view)
            if written != size:
                raise ValueError(f"{path}: {written} bytes were given, {size} announced")
            announce("sync", path)
            file.close()
        except BaseException:
            with contextlib.suppress(Exception):
                file.discard()
            file.closed = True  # or its destructor would complete the upload of half an object
            raise


def _entry(info: dict[str, Any]) -> Entry:
    return Entry("folder", 0) if info["type"] == "directory" else Entry("file", int(info["size"]))


def _same(one: str, other: str) -> bool:
    return one.strip("/") == other.strip("/")


def _mark_first(path: str) -> tuple[int, str]:
    """Sorts what makes a folder a checkpoint before all else."""
    order = {"COMMIT": 0, "manifest.json": 1}
    return order.get(path.rpartition("/")[2], 2), path


def _open(place: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path in it.

    Raises:
        JobError: the kind of URL is not known, or its package is missing.
    """
    kind = place.partition("://")[0]
    try:
        files, root = fsspec.core.url_to_fs(place)
    except ImportError as error:
        extra = _EXTRAS.get(kind)
        install = f"pip install 'paceline[{extra}]'" if extra else f"Install the fsspec package for {kind}://"
        raise JobError(f"{place} needs a package: {error}", values={"place": place}, hint=f"{install}.") from None
    except ValueError as error:
        raise JobError(f"{place} is no place for checkpoints: {error}", values={"place": place}) from None
    return files, str(root).rstrip("/")

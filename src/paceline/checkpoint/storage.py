"""Where checkpoints lie: a local folder or an object store, under one rule. No torch.

The rule: a name is written once and never changed, a write is durable when it returns, and what makes a checkpoint valid
(its `COMMIT`) comes last. `open_storage` gives a `LocalStorage` (folders, with every file and folder synced) or an
`ObjectStorage` (anything that fsspec opens: `s3://bucket/prefix`, `memory://x`).

Names are relative to the place, with "/" between folders.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from paceline.checkpoint.storage_errors import explain
from paceline.checkpoint.storage_names import checked_name, join

__all__ = [
    "READ_SLICE_BYTES",
    "WRITE_SLICE_BYTES",
    "Entry",
    "Kind",
    "Operation",
    "Storage",
    "announce",
    "checked_name",
    "explain",
    "join",
    "open_storage",
    "slices",
]

Operation = Literal["create", "write", "sync", "rename", "unlink", "mkdir"]
Kind = Literal["file", "folder", "link"]

WRITE_SLICE_BYTES = 8 * 2**20
READ_SLICE_BYTES = 8 * 2**20

on_operation: Callable[[Operation, str], None] | None = None
"""Called before each change that a storage makes, with the operation and the path: tests stop a save there."""

_URL = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://")


class Entry(NamedTuple):
    """What has a name in a folder; `size` is that of a file, 0 for others."""

    kind: Kind
    size: int


class Storage(Protocol):
    """Files under one place. OS errors pass through unchanged: `explain` says what they mean."""

    @property
    def place(self) -> str:
        """As the user gave it, for messages."""

    @property
    def is_remote(self) -> bool:
        """Whether a failed read speaks of the way to the place rather than of the file."""

    def exists(self, name: str) -> bool:
        """Whether a file or a folder has this name."""

    def kind(self, name: str) -> Kind | None:
        """What has this name; None where nothing has. A link is never followed here."""

    def size(self, name: str) -> int | None:
        """Bytes of a file; None where there is none."""

    def names(self, folder: str = "") -> list[str]:
        """Last parts of the names directly in a folder, sorted; none where there is no folder."""

    def entries(self, folder: str = "") -> dict[str, Entry]:
        """As `names`, with what each is: one question to the place where `kind` and `size` ask one for each name."""

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Bytes `begin` to `end` of a file; fewer where it is shorter. Raises FileNotFoundError."""

    def write(self, name: str, parts: Iterable[bytes | bytearray | memoryview], size: int) -> None:
        """A new file of the parts in order, `size` bytes in all, durable when this returns.

        Raises:
            FileExistsError: nothing is ever overwritten.
            ValueError: the parts are not `size` bytes.
        """

    def commit(self, name: str, data: bytes) -> None:
        """A new small file that is either not there or whole, whatever happens; durable with its folder on return."""

    def make_folder(self, name: str) -> None:
        """A new folder (one level; "" makes the place itself with its parents). No change where it is there."""

    def sync_folder(self, name: str) -> None:
        """Make what was created, renamed or removed in a folder durable."""

    def remove(self, name: str) -> None:
        """Remove a file."""

    def remove_folder(self, name: str) -> None:
        """Remove a folder and all in it; what makes it a checkpoint goes first."""

    def move_folder(self, old: str, new: str) -> None:
        """Give a folder a new name, which nothing may have yet. Raises FileExistsError."""

    def free_bytes(self) -> int | None:
        """Room for this user; None where the place does not say."""

    def free_files(self) -> int | None:
        """Files (inodes) that may still be made; None where the place does not say."""


def open_storage(place: str | Path) -> Storage:
    """The storage at a folder or a URL. Makes nothing: `make_folder("")` does.

    Raises:
        JobError: the URL's kind is not known, or needs a package that is not installed.
    """
    text = str(place)
    match = _URL.match(text)
    is_local = match is None or match[1] == "file"
    module = importlib.import_module(f"paceline.checkpoint.storage_{'local' if is_local else 'object'}")
    storage: Storage = module.LocalStorage(text) if is_local else module.ObjectStorage(text)
    return storage


def announce(operation: Operation, path: str) -> None:
    """Tell `on_operation` what is about to be done."""
    if on_operation is not None:
        on_operation(operation, path)


def slices(data: bytes | bytearray | memoryview, size: int) -> Iterable[memoryview]:
    """Views of `size` bytes each (the last may be shorter); nothing is copied."""
    view = memoryview(data).cast("B")
    return (view[begin : begin + size] for begin in range(0, len(view), size))

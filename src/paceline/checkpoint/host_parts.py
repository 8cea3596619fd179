"""What the writers of several hosts leave each other in the folder of a step. No torch.

The coordinator (host 0) makes the folder and `begin.json`; every other host writes its ranks' files, then
`part-<node>.json` with what it knows of them; the coordinator takes and removes these before it writes the manifest. All
carry the token of the attempt and the number of the save: a file of an earlier one is never taken for this one's.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from paceline.checkpoint.piece_file import WrittenFile
from paceline.checkpoint.storage import Storage

BEGIN_FILE = "begin.json"


class Begin(msgspec.Struct, frozen=True):
    """The folder is that of this save."""

    token: str
    number: int


class HostPart(msgspec.Struct, frozen=True, kw_only=True):
    """All that one host has written: its files, and what is each rank's own."""

    token: str
    number: int
    node: int
    files: list[WrittenFile]
    own: dict[int, dict[str, Any]]


Noted = TypeVar("Noted", Begin, HostPart)


def part_file(node: int) -> str:
    return f"part-{node}.json"


def write_begin(storage: Storage, folder: str, begin: Begin) -> None:
    _write(storage, f"{folder}/{BEGIN_FILE}", begin)


def has_begun(storage: Storage, folder: str, begin: Begin) -> bool:
    """Whether the coordinator has made the folder for this very save."""
    return _read(storage, f"{folder}/{BEGIN_FILE}", Begin) == begin


def write_part(storage: Storage, folder: str, part: HostPart) -> None:
    _write(storage, f"{folder}/{part_file(part.node)}", part)


def read_part(storage: Storage, folder: str, node: int, begin: Begin) -> HostPart | None:
    """What host `node` has written for this save; None where it is not done yet."""
    part = _read(storage, f"{folder}/{part_file(node)}", HostPart)
    return part if part is not None and (part.token, part.number) == (begin.token, begin.number) else None


def remove_parts(storage: Storage, folder: str, nodes: int) -> None:
    for name in (*(part_file(node) for node in range(1, nodes)), BEGIN_FILE):
        storage.remove(f"{folder}/{name}")


def _write(storage: Storage, name: str, value: msgspec.Struct) -> None:
    # Appears whole or not at all: the other host looks at it at any time.
    storage.commit(name, msgspec.json.encode(value) + b"\n")


def _read(storage: Storage, name: str, kind: type[Noted]) -> Noted | None:
    try:
        return msgspec.json.decode(storage.read(name), type=kind)
    except FileNotFoundError:
        return None

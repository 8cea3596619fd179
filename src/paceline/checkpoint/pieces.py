"""Reading pieces: nothing is taken from one before its bytes gave the checksum that the manifest states. No torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from paceline.checkpoint.boxes import Box, tiles
from paceline.checkpoint.folders import step_folder
from paceline.checkpoint.manifest import ELEMENT_BYTES, Manifest, Piece, StoredTensor, piece_checksum
from paceline.checkpoint.storage import Storage, join
from paceline.checkpoint.storage_errors import explain
from paceline.errors import NoCheckpoint, PacelineError

PIECE_BYTES = 16 * 2**20
"""Bytes of a piece, about: a reader of a part checks little more than it needs, and holds one piece beside its own."""


class PieceReader:
    """Reads checked pieces of one checkpoint.

    Args:
        storage, manifest: the checkpoint.
        folder: its folder in the storage; that of the manifest's step unless given.
    """

    def __init__(self, storage: Storage, manifest: Manifest, folder: str | None = None) -> None:
        self.storage = storage
        self.manifest = manifest
        self.folder = step_folder(manifest.step) if folder is None else folder
        self._checked: set[str] = set()
        self.pieces_read = 0
        self.bytes_read = 0

    @property
    def where(self) -> str:
        """The checkpoint's place, for messages."""
        return join(self.storage.place, self.folder)

    def tensor(self, name: str) -> StoredTensor:
        """What is stored under `name`.

        Raises:
            NoCheckpoint: the manifest contradicts itself about it.
        """
        stored = self.manifest.tensors[name]
        reason = None if name in self._checked else contradiction(self.manifest, stored)
        if reason:
            raise NoCheckpoint(
                f"the manifest of {self.where} contradicts itself about {name}: {reason}",
                values={"path": self.where, "tensor": name, "reason": reason},
                hint="Resume from another checkpoint; `paceline checkpoint list` shows them.",
            )
        self._checked.add(name)
        return stored

    def read(self, name: str, piece: Piece) -> bytes:
        """The bytes of a piece of tensor `name`.

        Raises:
            NoCheckpoint: the file is missing, too short, or its bytes are not those that were written.
        """
        path = f"{self.folder}/{piece.file}" if self.folder else piece.file
        size = piece.end - piece.begin
        try:
            with explained(self.storage, path):
                data = self.storage.read(path, piece.begin, piece.end)
        except FileNotFoundError:
            raise self._damaged(name, piece, f"{size} bytes", "no such file") from None
        if len(data) != size:
            raise self._damaged(name, piece, f"{size} bytes", f"{len(data)} bytes before the file ends")
        found = piece_checksum(data)
        if found != piece.checksum:
            raise self._damaged(name, piece, f"checksum {piece.checksum}", found)
        self.pieces_read += 1
        self.bytes_read += size
        return data

    def _damaged(self, name: str, piece: Piece, expected: str, actual: str) -> NoCheckpoint:
        return NoCheckpoint(
            f"{self.where}/{piece.file} is damaged: the piece of {name} at {list(piece.offset)} (bytes {piece.begin} to "
            f"{piece.end}) should give {expected}, and gives {actual}",
            values={
                "path": f"{self.where}/{piece.file}",
                "tensor": name,
                "offset": list(piece.offset),
                "expected": expected,
                "actual": actual,
            },
            hint="Resume from an older checkpoint; `paceline checkpoint list` shows them.",
        )


@contextlib.contextmanager
def explained(storage: Storage, name: str, needed_bytes: int | None = None) -> Iterator[None]:
    """What a storage raises becomes an error that says what it means; a file that is not there stays what it is."""
    try:
        yield
    except (PacelineError, ValueError, FileNotFoundError):
        raise
    except Exception as error:
        raise explain(error, storage, name, needed_bytes) from error


def contradiction(manifest: Manifest, stored: StoredTensor) -> str | None:
    """Why the manifest cannot be right about a tensor; None where it can."""
    if stored.dtype not in ELEMENT_BYTES:
        return f"its type {stored.dtype!r} is unknown"
    if any(extent < 0 for shape in (stored.shape, *(p.shape for p in stored.pieces)) for extent in shape):
        return f"its shape {stored.shape} or that of a piece is negative"
    for piece in stored.pieces:
        if reason := _misplaced(manifest, stored, piece):
            return f"the piece at {list(piece.offset)} {reason}"
    if not tiles([Box(p.offset, p.shape) for p in stored.pieces], stored.shape):
        return f"its {len(stored.pieces)} pieces do not cover shape {stored.shape} exactly once"
    return None


def _misplaced(manifest: Manifest, stored: StoredTensor, piece: Piece) -> str | None:
    file = manifest.files.get(piece.file)
    if file is None:
        return f"lies in {piece.file}, which is not among the files"
    if not file.header_bytes <= piece.begin <= piece.end <= file.size_bytes:
        room = f"{file.header_bytes} to {file.size_bytes}"
        return f"lies at bytes {piece.begin} to {piece.end} of {piece.file}, whose pieces are in {room}"
    size = Box(piece.offset, piece.shape).elements * ELEMENT_BYTES[stored.dtype]
    if piece.end - piece.begin != size:
        return f"has {piece.end - piece.begin} bytes where its shape {piece.shape} needs {size}"
    return None

"""Writing checkpoints from pieces at hand, in the order that makes them safe: files, manifest, commit mark. No torch.

For what is not training: `convert`, `import` and the adapter of `torch.distributed.checkpoint`. Training's own saves go
through a writer process (`writer.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from paceline.checkpoint.boxes import Box, rows
from paceline.checkpoint.folders import step_folder
from paceline.checkpoint.header import entry_name, safetensors_header
from paceline.checkpoint.manifest import (
    COMMIT_FILE,
    ELEMENT_BYTES,
    MANIFEST_FILE,
    Manifest,
    Piece,
    StoredFile,
    StoredTensor,
    commit_of,
    encode_commit,
    encode_manifest,
    piece_checksum,
)
from paceline.checkpoint.pieces import PIECE_BYTES, explained
from paceline.checkpoint.storage import Storage, join
from paceline.errors import JobError


class NewPiece(NamedTuple):
    """A box to be written of tensor `name`, whose whole shape is `shape`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box

    @property
    def size_bytes(self) -> int:
        return self.box.elements * ELEMENT_BYTES[self.dtype]


class WrittenFile(NamedTuple):
    """A file of pieces that is on disk."""

    name: str
    file: StoredFile
    pieces: list[tuple[NewPiece, Piece]]


def file_name(index: int) -> str:
    return f"rank-{index:05d}.safetensors"


def cut(piece: NewPiece) -> Iterator[NewPiece]:
    """The piece in pieces of `PIECE_BYTES`, about; none where it is empty and its tensor is not."""
    if piece.box.elements == 0 and 0 not in piece.shape:
        return
    for box in rows(piece.box, PIECE_BYTES // ELEMENT_BYTES[piece.dtype]):
        yield piece._replace(box=box)


def begin_step(storage: Storage, step: int) -> str:
    """Make the folder of a step; returns its name.

    Raises:
        JobError: something is there already, complete or not.
    """
    folder = step_folder(step)
    where = join(storage.place, folder)
    with explained(storage, folder):
        if storage.exists(folder):
            raise JobError(
                f"{where} is there already; a checkpoint is never overwritten",
                values={"path": where, "step": step},
                hint="Name another place, or remove that folder.",
            )
        storage.make_folder("")
        storage.make_folder(folder)
    return folder


def write_piece_file(
    storage: Storage,
    folder: str,
    file: str,
    pieces: Iterable[NewPiece],
    content: Callable[[NewPiece], bytes | memoryview],
) -> WrittenFile:
    """Write and sync one file of pieces.

    Args:
        pieces: in any order; widest elements come first in the file, so that all are aligned.
        content: the bytes of a piece. Called once for each, in the order of the file; one is held at a time.
    """
    ordered = sorted(pieces, key=lambda p: (-ELEMENT_BYTES[p.dtype], p.name, p.box.offset))
    ends = [0]
    for piece in ordered:
        ends.append(ends[-1] + piece.size_bytes)
    header = safetensors_header(
        [
            (entry_name(p.name, p.box.offset), p.dtype, p.box.shape, begin, end)
            for p, begin, end in zip(ordered, ends, ends[1:], strict=False)
        ]
    )
    checksums: list[str] = []

    def parts() -> Iterator[bytes | memoryview]:
        yield header
        for piece in ordered:
            data = content(piece)
            if len(data) != piece.size_bytes:
                raise ValueError(f"{piece.name}: {len(data)} bytes where {piece.size_bytes} were announced")
            checksums.append(piece_checksum(data))
            yield data

    size, path = len(header) + ends[-1], f"{folder}/{file}"
    with explained(storage, path, size):
        storage.write(path, parts(), size)
    begins = [len(header) + end for end in ends]
    stored = [
        Piece(p.box.offset, p.box.shape, file, begin, end, checksum)
        for p, begin, end, checksum in zip(ordered, begins, begins[1:], checksums, strict=False)
    ]
    return WrittenFile(
        file, StoredFile(size, len(header), piece_checksum(header)), list(zip(ordered, stored, strict=True))
    )


def tensors_of(files: Sequence[WrittenFile]) -> dict[str, StoredTensor]:
    """The manifest's tensors: by name, pieces by offset."""
    by_name: dict[str, list[tuple[NewPiece, Piece]]] = {}
    for file in files:
        for new, piece in file.pieces:
            by_name.setdefault(new.name, []).append((new, piece))
    return {
        name: StoredTensor(
            found[0][0].dtype, found[0][0].shape, tuple(sorted((p for _, p in found), key=lambda p: p.offset))
        )
        for name, found in by_name.items()
    }


def commit_step(storage: Storage, manifest: Manifest) -> None:
    """Write the manifest and, when it is safe, the commit mark: from then on there is a checkpoint."""
    folder, encoded = step_folder(manifest.step), encode_manifest(manifest)
    path = f"{folder}/{MANIFEST_FILE}"
    with explained(storage, path, len(encoded)):
        storage.sync_folder(folder)
        storage.write(path, [encoded], len(encoded))
        storage.sync_folder(folder)
        storage.commit(f"{folder}/{COMMIT_FILE}", encode_commit(commit_of(manifest, encoded)))

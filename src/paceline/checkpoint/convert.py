"""Checkpoints into other checkpoints and into plain safetensors, and back. One piece, or one tensor, is in memory at a time.

`convert` keeps the pieces as they are cut, so a checkpoint of any size is repacked in little memory, each piece verified
as it is read. `export_weights` makes whole tensors, `import_weights` cuts them.
"""

from __future__ import annotations

import heapq
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from paceline import __version__
from paceline.checkpoint.boxes import Box, Placement
from paceline.checkpoint.header import safetensors_header
from paceline.checkpoint.manifest import ELEMENT_BYTES, Manifest, Piece
from paceline.checkpoint.piece_file import (
    NewPiece,
    WrittenFile,
    begin_step,
    commit_step,
    cut,
    file_name,
    tensors_of,
    write_piece_file,
)
from paceline.checkpoint.pieces import PieceReader, explained
from paceline.checkpoint.places import find_one
from paceline.checkpoint.plain import PlainFile
from paceline.checkpoint.reader import DTYPES, piece_tensor, read_whole, tensor_bytes
from paceline.checkpoint.storage import Storage, join, open_storage
from paceline.errors import JobError

MODEL = "model/"
BUFFER = "buffer/"
FIRST_BUFFERS = f"{BUFFER}0/"
DTYPE_WORDS = {"bf16": "BF16", "fp32": "F32"}
FLOATS = {name for name, dtype in DTYPES.items() if dtype.is_floating_point}

Progress = Callable[[int, int], None]
"""Called with the bytes written so far and those to be written in all."""


class Converted(NamedTuple):
    """What was written: the step's folder or the file, its step, tensors, files of pieces and bytes."""

    path: str
    step: int
    tensors: int
    files: int
    size_bytes: int


def convert(
    source: str,
    target: str,
    *,
    files: int = 1,
    weights_only: bool = False,
    dtype: str | None = None,
    progress: Progress | None = None,
) -> Converted:
    """Write the checkpoint at `source` again, as the same step in the checkpoints folder or URL `target`.

    Args:
        files: files of pieces to spread it over, equal in bytes to within a piece.
        weights_only: leave out the optimizer's tensors and all that is no tensor. A run cannot go on from it exactly.
        dtype: `bf16` or `fp32` for parameters of a floating-point type; with weights_only.

    Raises:
        NoCheckpoint: there is none at `source`, or it is damaged.
        JobError: more files than pieces, or the step is in `target` already.
        DiskFull: no room; what was begun is removed.
    """
    found = find_one(source)
    reader = PieceReader(found.storage, found.manifest(), found.folder)
    manifest = reader.manifest
    wanted = dict(_pieces(reader, weights_only, dtype))
    if files > len(wanted):
        raise JobError(
            f"{files} files cannot be filled: {reader.where} has {len(wanted)} pieces",
            values={"files": files, "pieces": len(wanted)},
            hint=f"Take --files {len(wanted)} or fewer.",
        )
    storage = open_storage(target)
    ticks = _Ticks(progress, sum(new.size_bytes for new in wanted))

    def content(new: NewPiece) -> bytes | memoryview:
        data = reader.read(new.name, wanted[new])
        held = manifest.tensors[new.name].dtype
        ticks.add(new.size_bytes)
        if held == new.dtype:
            return data
        return tensor_bytes(piece_tensor(data, held, new.box.shape).to(DTYPES[new.dtype]))

    shared = [(file_name(index), pieces) for index, pieces in enumerate(_spread(list(wanted), files))]
    changes: dict[str, Any] = {"state": {}, "ranks": [], "next_step": None} if weights_only else {}
    return _write(storage, msgspec.structs.replace(manifest, version=__version__, **changes), shared, content)


def export_weights(
    source: str, target: str, *, dtype: str | None = None, progress: Progress | None = None
) -> Converted:
    """Write the model's tensors whole into one plain safetensors file, under the names that the module gives them.

    Parameters lose `model/`, buffers of rank 0 `buffer/0/`. The file is there whole or not at all.

    Args:
        target: a file that is not there yet; its folder is made.
        dtype: `bf16` or `fp32` for parameters of a floating-point type; their own unless given.

    Raises:
        NoCheckpoint: there is no checkpoint at `source`, or it is damaged.
        JobError: `target` is there already.
        DiskFull: no room; what was begun is removed.
    """
    found = find_one(source)
    manifest = found.manifest()
    names = _exported(manifest, found.where)
    kinds = {name: _converted(name, manifest.tensors[name].dtype, dtype) for name in names}
    ordered = sorted(names, key=lambda name: (-ELEMENT_BYTES[kinds[name]], names[name]))
    ends = [0]
    for name in ordered:
        elements = Placement.whole(manifest.tensors[name].shape).box.elements
        ends.append(ends[-1] + elements * ELEMENT_BYTES[kinds[name]])
    entries = [
        (names[name], kinds[name], manifest.tensors[name].shape, begin, end)
        for name, begin, end in zip(ordered, ends, ends[1:], strict=False)
    ]
    header = safetensors_header(entries, {"format": "pt"})
    ticks = _Ticks(progress, ends[-1])

    def parts() -> Iterator[bytes | memoryview]:
        yield header
        for name, tensor in read_whole(found.storage, manifest, ordered, folder=found.folder):
            data = tensor_bytes(tensor.to(DTYPES[kinds[name]]))
            ticks.add(len(data))
            yield data

    size = len(header) + ends[-1]
    _write_file(target, parts(), size)
    return Converted(target, manifest.step, len(ordered), 1, size)


def import_weights(source: str, target: str, *, progress: Progress | None = None) -> Converted:
    """Write the tensors of a plain safetensors file as a checkpoint of step 0, with weights alone.

    Args:
        source: a file as `export_weights` or the safetensors library writes it.
        target: a checkpoints folder or URL.

    Raises:
        JobError: the file is no safetensors file, is cut short, or the step is in `target` already.
        DiskFull: no room; what was begun is removed.
    """
    with PlainFile(Path(source)) as plain:
        pieces = {
            piece: plain.entries[name]
            for name, entry in plain.entries.items()
            for piece in cut(NewPiece(MODEL + name, entry.dtype, entry.shape, Placement.whole(entry.shape).box))
        }
        ticks = _Ticks(progress, sum(piece.size_bytes for piece in pieces))

        def content(piece: NewPiece) -> bytes:
            ticks.add(piece.size_bytes)
            return plain.read(pieces[piece], _first_byte(piece), piece.size_bytes)

        manifest = Manifest(
            version=__version__, run_id="", attempt=0, step=0, samples=0, time=time.time(), world_size=1, layout={},
            tensors={}, files={}, state={}, ranks=[], about={"imported_from": str(source)},
        )  # fmt: skip
        return _write(open_storage(target), manifest, [(file_name(0), list(pieces))], content)


class _Ticks:
    """Adds up what was done."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def add(self, size: int) -> None:
        self._done += size
        if self._progress is not None:
            self._progress(self._done, self._total)


def _pieces(reader: PieceReader, weights_only: bool, dtype: str | None) -> Iterator[tuple[NewPiece, Piece]]:
    """Each piece as it will be written, and as it lies in the source."""
    for name in sorted(reader.manifest.tensors):
        if weights_only and not name.startswith((MODEL, BUFFER)):
            continue
        stored = reader.tensor(name)
        kind = _converted(name, stored.dtype, dtype)
        empty = 0 in stored.shape
        for piece in stored.pieces:
            box = Box(piece.offset, piece.shape)
            if box.elements or empty:
                yield NewPiece(name, kind, stored.shape, box), piece


def _converted(name: str, dtype: str, word: str | None) -> str:
    """The type that a tensor gets."""
    return DTYPE_WORDS[word] if word and name.startswith(MODEL) and dtype in FLOATS else dtype


def _spread(pieces: list[NewPiece], files: int) -> list[list[NewPiece]]:
    """The pieces over so many files: the largest first, each to the file that has least."""
    shares: list[list[NewPiece]] = [[] for _ in range(files)]
    loads = [(0, 0, index) for index in range(files)]
    for piece in sorted(pieces, key=lambda p: (-p.size_bytes, p)):
        size, count, index = heapq.heappop(loads)
        shares[index].append(piece)
        heapq.heappush(loads, (size + piece.size_bytes, count + 1, index))
    return shares


def _write(
    storage: Storage,
    manifest: Manifest,
    files: list[tuple[str, list[NewPiece]]],
    content: Callable[[NewPiece], bytes | memoryview],
) -> Converted:
    """Files, manifest, commit mark; where one of them fails, the folder is removed again."""
    folder = begin_step(storage, manifest.step)
    try:
        written: list[WrittenFile] = [
            write_piece_file(storage, folder, file, pieces, content) for file, pieces in files
        ]
        tensors = tensors_of(written)
        stated = {file.name: file.file for file in written}
        commit_step(storage, msgspec.structs.replace(manifest, tensors=tensors, files=stated, digest=""))
    except BaseException:
        storage.remove_folder(folder)
        raise
    size = sum(file.file.size_bytes for file in written)
    return Converted(join(storage.place, folder), manifest.step, len(tensors), len(written), size)


def _exported(manifest: Manifest, where: str) -> dict[str, str]:
    """Names in the checkpoint and in the file."""
    names = {
        name: name.removeprefix(prefix)
        for prefix in (FIRST_BUFFERS, MODEL)
        for name in manifest.tensors
        if name.startswith(prefix)
    }
    if not names:
        raise JobError(f"{where} holds no weights", values={"path": where})
    return names


def _write_file(target: str, parts: Iterator[bytes | memoryview], size: int) -> None:
    remote = "://" in target
    folder, name = target.rsplit("/", 1) if remote else (str(Path(target).parent), Path(target).name)
    storage = open_storage(folder)
    if storage.exists(name):
        raise JobError(f"{target} is there already and is never overwritten", values={"path": target})
    partial = name if remote else f".{name}.{os.getpid()}.partial"  # an object appears whole or not at all
    with explained(storage, name, size):
        storage.make_folder("")
        storage.write(partial, parts, size)
        if not remote:
            Path(folder, partial).rename(target)
            storage.sync_folder("")


def _first_byte(piece: NewPiece) -> int:
    """Where a piece of whole rows begins in its tensor."""
    if not piece.box.shape:
        return 0
    row = Box(piece.box.offset, (1, *piece.shape[1:])).elements * ELEMENT_BYTES[piece.dtype]
    return piece.box.offset[0] * row

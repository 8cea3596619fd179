"""A small checkpoint, written by hand from header, manifest and storage alone."""

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from paceline.checkpoint.boxes import Box, rows
from paceline.checkpoint.folders import step_folder
from paceline.checkpoint.header import Entry, entry_name, safetensors_header
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
from paceline.checkpoint.storage import Storage

SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "model/odd": ("F32", (3, 5)),
    "model/half": ("BF16", (7,)),
    "model/one": ("F32", (1,)),
    "model/tall": ("F32", (129, 3)),
    "model/empty": ("F32", (0, 4)),
    "optimizer/step/odd": ("F32", ()),
    "buffer/0/ids": ("I64", (5, 2)),
    "buffer/1/mask": ("BOOL", (3,)),
}
"""Type and shape by name."""


class Cut(NamedTuple):
    name: str
    dtype: str
    box: Box
    data: bytes


def content(name: str, step: int, seed: int = 0) -> bytes:
    """The bytes of a whole tensor."""
    dtype, shape = SHAPES[name]
    count = Box((), shape).elements * ELEMENT_BYTES[dtype]
    return random.Random(f"{seed} {step} {name}").randbytes(count)


def files_of(step: int, count: int, seed: int = 0) -> dict[str, list[Cut]]:
    """The pieces of each file: tensors cut by rows of about 64 elements, dealt out in turn, wide elements first."""
    cuts = []
    for name, (dtype, shape) in SHAPES.items():
        data, begin = content(name, step, seed), 0
        for box in rows(Box((0,) * len(shape), shape), 64):
            size = box.elements * ELEMENT_BYTES[dtype]
            cuts.append(Cut(name, dtype, box, data[begin : begin + size]))
            begin += size
    dealt = {f"rank-{rank:05d}.safetensors": cuts[rank::count] for rank in range(count)}
    return {file: sorted(mine, key=lambda cut: -ELEMENT_BYTES[cut.dtype]) for file, mine in dealt.items()}


def header_of(cuts: Sequence[Cut]) -> bytes:
    entries, begin = [], 0
    for cut in cuts:
        name = entry_name(cut.name, cut.box.offset)
        entries.append(Entry(name, cut.dtype, cut.box.shape, begin, begin + len(cut.data)))
        begin += len(cut.data)
    return safetensors_header(entries)


def manifest_of(step: int, files: dict[str, list[Cut]], **fields: Any) -> Manifest:
    pieces: dict[str, list[Piece]] = {name: [] for name in SHAPES}
    stored = {}
    for file, cuts in files.items():
        header = header_of(cuts)
        begin = len(header)
        for cut in cuts:
            end = begin + len(cut.data)
            pieces[cut.name].append(Piece(cut.box.offset, cut.box.shape, file, begin, end, piece_checksum(cut.data)))
            begin = end
        stored[file] = StoredFile(begin, len(header), piece_checksum(header))
    tensors = {name: StoredTensor(*SHAPES[name], tuple(pieces[name])) for name in SHAPES}
    own: dict[str, Any] = {
        "version": "0.0.0",
        "run_id": "cafe0123",
        "attempt": 1,
        "step": step,
        "samples": step * 8,
        "time": 1.5,
        "world_size": len(files),
        "layout": {"dp_replicate": len(files)},
        "tensors": tensors,
        "files": stored,
        "state": {"loss_scale": None},
        "ranks": [{"python": [rank, 2, 3]} for rank in range(len(files))],
        "about": {"vocab_size": 5},
    }
    return Manifest(**(own | fields))


def write_checkpoint(
    storage: Storage,
    step: int = 100,
    *,
    count: int = 3,
    seed: int = 0,
    change: Callable[[Manifest], Manifest] = lambda manifest: manifest,
    commit: bool = True,
) -> Manifest:
    """A committed checkpoint of `count` files. `change` may make its manifest lie, in a way that its digest covers."""
    storage.make_folder("")
    folder, files = step_folder(step), files_of(step, count, seed)
    storage.make_folder(folder)
    for file, cuts in files.items():
        parts = [header_of(cuts), *(cut.data for cut in cuts)]
        storage.write(f"{folder}/{file}", parts, sum(map(len, parts)))
    manifest = change(manifest_of(step, files))
    encoded = encode_manifest(manifest)
    storage.write(f"{folder}/{MANIFEST_FILE}", [encoded], len(encoded))
    storage.sync_folder(folder)
    if commit:
        storage.commit(f"{folder}/{COMMIT_FILE}", encode_commit(commit_of(manifest, encoded)))
    return msgspec.json.decode(encoded, type=Manifest)

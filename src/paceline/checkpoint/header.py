"""The header of a file of pieces: that of safetensors, so that any reader of that format opens our files. No torch.

A file is 8 bytes (length of the text, little-endian), the text (JSON: name, type, shape, begin and end of each piece) filled
up with spaces so that the data begins at a multiple of 64 bytes, then the pieces one after the other without gaps. A
piece's name is its tensor's name, "@" and its offset: `model/embed.weight@512,0`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from paceline.checkpoint.manifest import Manifest, Piece

ALIGN_BYTES = 64


class Entry(NamedTuple):
    """A piece as the header lists it; `begin` and `end` count from where the data begins."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def entry_name(tensor: str, offset: Sequence[int]) -> str:
    """The name of the piece of `tensor` at `offset`; a tensor without dims has an empty offset."""
    return f"{tensor}@{','.join(map(str, offset))}"


def safetensors_header(entries: Sequence[Entry | tuple[str, str, tuple[int, ...], int, int]]) -> bytes:
    """The bytes before the data of a file that holds these pieces, in this order.

    Raises:
        ValueError: two pieces have the same name.
    """
    fields: dict[str, Any] = {}
    for name, dtype, shape, begin, end in entries:
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    if len(fields) != len(entries):
        raise ValueError("two pieces of one file have the same name")
    text = msgspec.json.encode(fields)
    text += b" " * (-(8 + len(text)) % ALIGN_BYTES)
    return len(text).to_bytes(8, "little") + text


def pieces_of(manifest: Manifest, file: str) -> list[tuple[str, str, Piece]]:
    """Tensor name, type and piece of all that lies in `file`, by where it begins."""
    found = [
        (name, tensor.dtype, piece)
        for name, tensor in manifest.tensors.items()
        for piece in tensor.pieces
        if piece.file == file
    ]
    return sorted(found, key=lambda item: (item[2].begin, item[2].end, item[0], item[2].offset))


def implied_header(manifest: Manifest, file: str) -> bytes:
    """The header that `file` must have by what the manifest says of its pieces."""
    base = manifest.files[file].header_bytes
    return safetensors_header(
        [
            Entry(entry_name(name, piece.offset), dtype, piece.shape, piece.begin - base, piece.end - base)
            for name, dtype, piece in pieces_of(manifest, file)
        ]
    )

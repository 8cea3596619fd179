"""The header of a file of pieces: that of safetensors, so that any reader of that format opens our files. No torch.

A file is 8 bytes (length of the text, little-endian), the text (JSON: name, type, shape, begin and end of each piece) filled
up with spaces so that the data begins at a multiple of 64 bytes, then the pieces one after the other without gaps. A
piece's name is its tensor's name, "@" and its offset: `model/embed.weight@512,0`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def safetensors_header(
    entries: Sequence[Entry | tuple[str, str, tuple[int, ...], int, int]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """The bytes before the data of a file that holds these pieces, in this order.

    Args:
        metadata: what other programs look for in a file of whole tensors; files of pieces have none.

    Raises:
        ValueError: two pieces have the same name.
    """
    fields: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    besides = len(fields)
    for name, dtype, shape, begin, end in entries:
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    if len(fields) != len(entries) + besides:
        raise ValueError("two pieces of one file have the same name")
    text = msgspec.json.encode(fields)
    text += b" " * (-(8 + len(text)) % ALIGN_BYTES)
    return len(text).to_bytes(8, "little") + text


class FilePiece(NamedTuple):
    """A piece in its file, with the name and the type of its tensor."""

    tensor: str
    dtype: str
    piece: Piece


def pieces_by_file(manifest: Manifest) -> dict[str, list[FilePiece]]:
    """All pieces by the file that holds them, each file's by where they begin; files without any have an empty list."""
    found: dict[str, list[FilePiece]] = {file: [] for file in manifest.files}
    for name, tensor in manifest.tensors.items():
        for piece in tensor.pieces:
            found.setdefault(piece.file, []).append(FilePiece(name, tensor.dtype, piece))
    for pieces in found.values():
        pieces.sort(key=lambda p: (p.piece.begin, p.piece.end, p.tensor, p.piece.offset))
    return found


def implied_header(pieces: Sequence[FilePiece], header_bytes: int) -> bytes:
    """The header that a file must have by what the manifest says of its pieces, which begin after `header_bytes`."""
    return safetensors_header(
        [
            Entry(entry_name(tensor, p.offset), dtype, p.shape, p.begin - header_bytes, p.end - header_bytes)
            for tensor, dtype, p in pieces
        ]
    )

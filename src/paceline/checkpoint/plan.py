"""Which rank writes what, and how its file is laid out. Every rank makes the same plan from the same lists. No torch.

What one rank alone holds, it writes. What several hold (replicas) is cut into pieces, and these are given, largest first,
to whichever of their holders has least to write so far: ranks that hold the same end within one piece of each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from paceline.checkpoint.boxes import Box, rows, tiles
from paceline.checkpoint.header import entry_name, safetensors_header
from paceline.checkpoint.manifest import ELEMENT_BYTES
from paceline.checkpoint.piece_file import NewPiece, file_name
from paceline.checkpoint.pieces import PIECE_BYTES


class Image(msgspec.Struct, frozen=True):
    """The file of one rank: `header`, then the pieces without gaps. `ends` are byte positions in the file.

    A rank that writes nothing has no pieces, and no file.
    """

    file: str
    header_bytes: int
    pieces: tuple[NewPiece, ...]
    ends: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return self.ends[-1] if self.ends else 0

    def spans(self) -> Iterator[tuple[NewPiece, int, int]]:
        """Each piece with the first byte of it and the first after it."""
        begin = self.header_bytes
        for piece, end in zip(self.pieces, self.ends, strict=True):
            yield piece, begin, end
            begin = end

    def header(self) -> bytes:
        """The bytes before the first piece."""
        return _header(
            [(piece, begin - self.header_bytes, end - self.header_bytes) for piece, begin, end in self.spans()]
        )


def plan_images(held: Sequence[Sequence[NewPiece]]) -> list[Image]:
    """The file of every rank.

    Args:
        held: per rank, each box that it holds. A name's boxes must tile its tensor; equal boxes are replicas.

    Raises:
        ValueError: boxes of a name leave a gap, overlap without being equal, or differ in type or shape.
    """
    holders = _holders(held)
    loads = [0] * len(held)
    parts: list[list[NewPiece]] = [[] for _ in held]
    # What cannot be given to another rank comes first, so that the rest evens it out.
    for piece, ranks in sorted(_cut(holders), key=lambda item: (len(item[1]) > 1, -item[0].size_bytes, item[0])):
        rank = min(ranks, key=lambda r: (loads[r], r))
        loads[rank] += piece.size_bytes
        parts[rank].append(piece)
    return [lay_out(file_name(rank), pieces) for rank, pieces in enumerate(parts)]


def lay_out(file: str, pieces: Sequence[NewPiece]) -> Image:
    """The image of a file with these pieces: widest elements first, so that every one is aligned."""
    ordered = sorted(pieces, key=lambda p: (-ELEMENT_BYTES[p.dtype], p.name, p.box.offset))
    ends = [0]
    for piece in ordered:
        ends.append(ends[-1] + piece.size_bytes)
    header_bytes = len(_header(list(zip(ordered, ends, ends[1:], strict=False))))
    return Image(file, header_bytes, tuple(ordered), tuple(header_bytes + end for end in ends[1:]))


def _header(spans: Sequence[tuple[NewPiece, int, int]]) -> bytes:
    return safetensors_header(
        [(entry_name(p.name, p.box.offset), p.dtype, p.box.shape, begin, end) for p, begin, end in spans]
    )


def _holders(held: Sequence[Sequence[NewPiece]]) -> dict[NewPiece, list[int]]:
    """The ranks that hold each box, after the check that the boxes of a name tile it. Boxes without elements are left out."""
    holders: dict[NewPiece, list[int]] = {}
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    for rank, boxes in enumerate(held):
        for box in boxes:
            known = kinds.setdefault(box.name, (box.dtype, box.shape))
            if known != (box.dtype, box.shape):
                raise ValueError(f"{box.name} is {known} on one rank and {(box.dtype, box.shape)} on rank {rank}")
            ranks = holders.setdefault(box, [])
            if rank in ranks[-1:]:
                raise ValueError(f"rank {rank} holds the box {box.box} of {box.name} twice")
            ranks.append(rank)
    by_name: dict[str, list[Box]] = {}
    for piece in holders:
        by_name.setdefault(piece.name, []).append(piece.box)
    for name, boxes_of_name in by_name.items():
        if not tiles(boxes_of_name, kinds[name][1]):
            raise ValueError(f"the ranks' boxes of {name} do not tile its shape {kinds[name][1]}: {boxes_of_name}")
    return {piece: ranks for piece, ranks in holders.items() if piece.box.elements}


def _cut(holders: dict[NewPiece, list[int]]) -> Iterator[tuple[NewPiece, list[int]]]:
    for piece, ranks in holders.items():
        for box in rows(piece.box, PIECE_BYTES // ELEMENT_BYTES[piece.dtype]):
            yield piece._replace(box=box), ranks

"""Writing a rank's file out of its staging buffer: no byte is copied, checksums are made as the bytes go by. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import xxhash

from paceline.checkpoint.manifest import Piece, StoredFile
from paceline.checkpoint.piece_file import WrittenFile
from paceline.checkpoint.plan import Image
from paceline.checkpoint.storage import WRITE_SLICE_BYTES, Storage


def write_image(
    storage: Storage, folder: str, image: Image, buffer: memoryview, check: Callable[[], None]
) -> WrittenFile:
    """Write and sync the file that lies in `buffer`, and state the checksum of each piece as it was staged.

    Args:
        check: called between slices; what it raises ends the write.
    """
    checksums = Checksums([image.header_bytes, *image.ends])

    def slices() -> Iterator[memoryview]:
        for begin in range(0, image.size_bytes, WRITE_SLICE_BYTES):
            check()
            part = buffer[begin : min(begin + WRITE_SLICE_BYTES, image.size_bytes)]
            yield part
            checksums.add(part)  # after it was given to the disk, which works meanwhile

    storage.write(f"{folder}/{image.file}", slices(), image.size_bytes)
    header, *sums = checksums.done
    pieces = [
        (piece, Piece(piece.box.offset, piece.box.shape, image.file, begin, end, checksum))
        for (piece, begin, end), checksum in zip(image.spans(), sums, strict=True)
    ]
    return WrittenFile(image.file, StoredFile(image.size_bytes, image.header_bytes, header), pieces)


class Checksums:
    """`piece_checksum` of each part of a stream that is cut at `ends`, whatever slices it comes in."""

    def __init__(self, ends: list[int]) -> None:
        self.done: list[str] = []
        self._ends = ends
        self._at = 0
        self._sum = xxhash.xxh3_128()

    def add(self, data: memoryview) -> None:
        """The next bytes of the stream."""
        while data:
            end = self._ends[len(self.done)]
            part = data[: end - self._at]
            self._sum.update(part)
            self._at += len(part)
            data = data[len(part) :]
            if self._at == end:
                self.done.append(self._sum.hexdigest())
                self._sum = xxhash.xxh3_128()

"""Writing a rank's file out of its staging buffer: no byte is copied on the way. No torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from paceline.checkpoint.manifest import Piece, StoredFile, piece_checksum
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

    def slices() -> Iterator[memoryview]:
        for begin in range(0, image.size_bytes, WRITE_SLICE_BYTES):
            check()
            yield buffer[begin : min(begin + WRITE_SLICE_BYTES, image.size_bytes)]

    checksums: list[str] = []
    # Beside the write, which waits for the disk.
    thread = threading.Thread(
        target=lambda: checksums.extend(_checksums(image, buffer)), name=f"checksums {image.file}"
    )
    thread.start()
    try:
        storage.write(f"{folder}/{image.file}", slices(), image.size_bytes)
    finally:
        thread.join()
    header, *sums = checksums
    pieces = [
        (piece, Piece(piece.box.offset, piece.box.shape, image.file, begin, end, checksum))
        for (piece, begin, end), checksum in zip(image.spans(), sums, strict=True)
    ]
    return WrittenFile(image.file, StoredFile(image.size_bytes, image.header_bytes, header), pieces)


def _checksums(image: Image, buffer: memoryview) -> Iterator[str]:
    """Of the header, then of each piece."""
    yield piece_checksum(buffer[: image.header_bytes])
    for _, begin, end in image.spans():
        yield piece_checksum(buffer[begin:end])

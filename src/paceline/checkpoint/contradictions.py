"""What a manifest says that cannot be true, whatever is in the files: its digest proves it unchanged, not right. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from paceline.checkpoint.findings import Finding
from paceline.checkpoint.header import FilePiece, implied_header
from paceline.checkpoint.manifest import MANIFEST_FILE, Manifest, StoredFile, piece_checksum
from paceline.checkpoint.pieces import contradiction


def contradictions(manifest: Manifest, by_file: Mapping[str, Sequence[FilePiece]]) -> list[Finding]:
    """Pieces that do not tile their tensor, bytes of a file that belong to no piece or to two, headers that are not theirs.

    Args:
        by_file: `pieces_by_file(manifest)`.
    """
    found = [
        Finding(MANIFEST_FILE, "the pieces", "to tile the tensor", reason, tensor=name)
        for name, stored in manifest.tensors.items()
        if (reason := contradiction(manifest, stored))
    ]
    for file, stored in manifest.files.items():
        found += _gaps(file, stored, by_file[file])
    if found:
        return found  # a header cannot be made from pieces that contradict each other
    return [f for file, stored in manifest.files.items() for f in _wrong_header(file, stored, by_file[file])]


def _gaps(file: str, stored: StoredFile, pieces: Sequence[FilePiece]) -> Iterator[Finding]:
    end = stored.header_bytes
    for tensor, _, piece in pieces:
        if piece.begin != end:
            what = f"the place in {file}"
            yield Finding(MANIFEST_FILE, what, f"to begin at byte {end}", f"byte {piece.begin}", tensor, piece.offset)
        end = piece.end
    if end != stored.size_bytes:
        actual = f"{stored.size_bytes} bytes"
        yield Finding(MANIFEST_FILE, f"the length of {file}", f"{end} bytes by its pieces", actual)


def _wrong_header(file: str, stored: StoredFile, pieces: Sequence[FilePiece]) -> Iterator[Finding]:
    implied = implied_header(pieces, stored.header_bytes)
    if len(implied) != stored.header_bytes or piece_checksum(implied) != stored.header_checksum:
        expected = f"{len(implied)} bytes with {piece_checksum(implied)} by its pieces"
        actual = f"{stored.header_bytes} bytes with {stored.header_checksum}"
        yield Finding(MANIFEST_FILE, f"the header of {file}", expected, actual)

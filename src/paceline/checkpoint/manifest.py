"""The manifest of a checkpoint: what was saved, where each piece lies, and what proves that it is whole. No torch.

A checkpoint is a folder `step-00000100` with

    rank-00000.safetensors ...   the pieces that each rank wrote
    manifest.json                this file's `Manifest`: all shapes, pieces, checksums and everything that is no tensor
    COMMIT                       the mark: without it there is no checkpoint. Written last, names the manifest's sha256

A shape is what the manifest says, never what files happen to be there. Files are written in one encoding only, so that a
changed byte that leaves the meaning alone is still found.
"""

from __future__ import annotations

import hashlib
from typing import Any, TypeVar

import msgspec
import xxhash

from paceline.errors import NoCheckpoint

FORMAT = "paceline.checkpoint/1"
MANIFEST_FILE = "manifest.json"
COMMIT_FILE = "COMMIT"

ELEMENT_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
"""Bytes of an element by the name that safetensors gives its type."""


class Piece(msgspec.Struct, frozen=True):
    """A box of a tensor and where its bytes lie: `begin` to `end` of `file`, row-major, little-endian.

    offset, shape: first index and extent in each dim. checksum: `piece_checksum` of the bytes.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    begin: int
    end: int
    checksum: str


class StoredTensor(msgspec.Struct, frozen=True):
    """A whole tensor: its safetensors type, its shape, and the pieces that tile it."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


class StoredFile(msgspec.Struct, frozen=True):
    """A file of pieces: its length, and the length and checksum of the safetensors header before the first piece."""

    size_bytes: int
    header_bytes: int
    header_checksum: str


class NextStep(msgspec.Struct, frozen=True):
    """What the first step after this checkpoint gave in the run that wrote it."""

    step: int
    loss: float | None
    grad_norm: float | None
    samples_digest: str | None = None


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """All of a checkpoint but the tensors' bytes.

    Attributes:
        step, samples: optimizer steps done and samples consumed.
        run_id, attempt: of the run that wrote it.
        world_size, layout: what it was written under; it loads under any other.
        tensors: by name: `model/<parameter>`, `optimizer/<kind>/<parameter>`, `buffer/<rank>/<name>`.
        files: by name.
        state: what is no tensor and equal on all ranks: `optimizer`, `loss_scale`, `evals`, ...
        ranks: per rank, what is its own: random states.
        about: model, data and tokenizer, for readers such as `generate`.
        next_step: None where the run ended or stopped here.
        digest: sha256 over all of the above.
    """

    format: str = FORMAT
    version: str
    run_id: str
    attempt: int
    step: int
    samples: int
    time: float
    world_size: int
    layout: dict[str, int | str]
    tensors: dict[str, StoredTensor]
    files: dict[str, StoredFile]
    state: dict[str, Any]
    ranks: list[dict[str, Any]]
    about: dict[str, Any]
    next_step: NextStep | None = None
    digest: str = ""

    @property
    def size_bytes(self) -> int:
        """Bytes of the files of pieces."""
        return sum(file.size_bytes for file in self.files.values())


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """The mark of a complete checkpoint."""

    format: str = FORMAT
    step: int
    manifest_bytes: int
    manifest_sha256: str


Written = TypeVar("Written", Commit, Manifest)


def piece_checksum(data: bytes | bytearray | memoryview) -> str:
    """XXH3-128 in hex: five times as fast as zlib's crc32 (decision 0006), and 2^-128 to miss a change."""
    return xxhash.xxh3_128_hexdigest(data)


def piece_hasher() -> xxhash.xxh3_128:
    """The same checksum for bytes that come in parts: `update` with each, then `hexdigest`."""
    return xxhash.xxh3_128()


def is_newer(format_name: object) -> bool:
    """Whether a format is one that a later version of this product writes, not something else or a damaged name."""
    kind, _, number = FORMAT.partition("/")
    stated = str(format_name).removeprefix(f"{kind}/")
    return stated.isascii() and stated.isdigit() and int(stated) > int(number)


def encode_manifest(manifest: Manifest) -> bytes:
    """The one encoding of a manifest, with its digest filled in."""
    return _encode(msgspec.structs.replace(manifest, digest=manifest_digest(manifest)))


def manifest_digest(manifest: Manifest) -> str:
    """sha256 over the manifest with an empty digest."""
    return hashlib.sha256(_encode(msgspec.structs.replace(manifest, digest=""))).hexdigest()


def commit_of(manifest: Manifest, encoded: bytes) -> Commit:
    return Commit(step=manifest.step, manifest_bytes=len(encoded), manifest_sha256=hashlib.sha256(encoded).hexdigest())


def encode_commit(commit: Commit) -> bytes:
    return _encode(commit)


def decode_commit(data: bytes, where: str) -> Commit:
    """The commit mark in `data`.

    Raises:
        NoCheckpoint: it is not one, is not in its one encoding, or is of a newer format.
    """
    return _decode(data, Commit, f"{where}/{COMMIT_FILE}")


def decode_manifest(data: bytes, commit: Commit, where: str) -> Manifest:
    """The manifest in `data`, which must be the one that the commit mark names.

    Raises:
        NoCheckpoint: its bytes are not those that were committed, or it is of a newer format.
    """
    path = f"{where}/{MANIFEST_FILE}"
    found = hashlib.sha256(data).hexdigest()
    if len(data) != commit.manifest_bytes or found != commit.manifest_sha256:
        raise NoCheckpoint(
            f"{path} is not the manifest that was committed: {len(data)} bytes with sha256 {found[:16]}, "
            f"expected {commit.manifest_bytes} bytes with {commit.manifest_sha256[:16]}",
            values={
                "path": path,
                "expected": f"{commit.manifest_bytes} bytes with sha256 {commit.manifest_sha256}",
                "actual": f"{len(data)} bytes with sha256 {found}",
            },
        )
    manifest = _decode(data, Manifest, path)
    if manifest.digest != manifest_digest(manifest) or manifest.step != commit.step:
        raise NoCheckpoint(
            f"{path} contradicts itself or its commit mark: step {manifest.step} and {commit.step}, "
            f"digest {manifest.digest[:16]} and {manifest_digest(manifest)[:16]}",
            values={"path": path, "step": manifest.step, "committed_step": commit.step},
        )
    return manifest


def _encode(value: msgspec.Struct) -> bytes:
    return msgspec.json.encode(value, order="deterministic") + b"\n"


def _decode(data: bytes, kind: type[Written], path: str) -> Written:
    try:
        head = msgspec.json.decode(data, type=_Head)
        if head.format != FORMAT:
            raise NoCheckpoint(
                f"{path} has format {head.format}, this version reads {FORMAT}",
                values={"path": path, "format": head.format, "reads": FORMAT},
                hint="Update paceline, or resume with the version that wrote it.",
            )
        value = msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise NoCheckpoint(f"{path} cannot be read: {error}", values={"path": path}) from None
    if _encode(value) != data:
        raise NoCheckpoint(f"{path} was changed after it was written", values={"path": path})
    return value


class _Head(msgspec.Struct):
    format: str

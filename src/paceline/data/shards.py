"""Token shards on disk: written whole or not at all, checked when opened, mapped when read. Imports no torch.

A shard holds the tokens of a run of pieces of one source, per split (`train` or the name of an eval set): a file of
token ids (little-endian uint16, or uint32 for vocabularies above 65,536) and a file of the places (int64) where
documents begin. Its record, a JSON file, is written after both; the manifest lists all records and is written last. A
file without a record is left over from an interruption and never read.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.errors import DataError, DiskFull
from paceline.units import MiB, format_bytes

SCHEMA = "paceline.shards/1"
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
SMALL_FILE_BYTES = 1 * MiB
"""Files up to this size have their checksum verified whenever they are opened; larger ones on `inspect --verify`."""

_PREPARE = "Run paceline data prepare to build it again."


class File(msgspec.Struct, frozen=True):
    """A file of the cache folder, with what it must be like."""

    name: str
    size_bytes: int
    sha256: str


class Part(msgspec.Struct, frozen=True):
    """The tokens of one split in one shard."""

    token_count: int
    documents: int
    tokens: File
    starts: File


class Shard(msgspec.Struct, frozen=True):
    """A run of pieces of one source."""

    stream: str
    index: int
    pieces: int
    text_bytes: int
    parts: dict[str, Part]

    @property
    def record_name(self) -> str:
        """File name of the record."""
        return f"{self.stream}-{self.index:05d}.json"


class TokenizerRecord(msgspec.Struct, frozen=True):
    """Which tokenizer made the shards."""

    name: str
    fingerprint: str
    vocabulary: int
    separator: int


class StreamRecord(msgspec.Struct, frozen=True):
    """One source: of the training data (and of what is held out of it), or of a named eval set."""

    stream: str
    source: str
    splits: list[str]


class Manifest(msgspec.Struct, frozen=True):
    """All that is in a cache folder."""

    schema: str
    key: str
    tokenizer: TokenizerRecord
    token_dtype: str
    streams: list[StreamRecord]
    shards: list[Shard]
    fingerprint: str = ""

    def parts(self, split: str, stream: str) -> list[Part]:
        """The parts of one split of one source, in order."""
        own = (s for s in self.shards if s.stream == stream)
        return [s.parts[split] for s in sorted(own, key=lambda s: s.index) if split in s.parts]

    def splits(self) -> list[str]:
        """`train` and the eval sets' names."""
        return list(dict.fromkeys(split for stream in self.streams for split in stream.splits))

    def files(self) -> list[File]:
        """Every token and start file."""
        return [f for s in self.shards for p in s.parts.values() for f in (p.tokens, p.starts)]


def token_dtype(vocabulary: int) -> str:
    """The smallest type that holds every id: `<u2` or `<u4`."""
    return "<u2" if vocabulary <= 1 << 16 else "<u4"


def write_part(folder: Path, stem: str, tokens: npt.NDArray[Any], starts: npt.NDArray[np.int64]) -> Part:
    """Write the tokens and document starts of one split.

    Raises:
        DiskFull: no space is left; what was half written is removed.
    """
    return Part(
        token_count=tokens.size,
        documents=starts.size,
        tokens=write_file(folder / f"{stem}.tokens", np.ascontiguousarray(tokens).data.cast("B")),
        starts=write_file(folder / f"{stem}.starts", starts.astype("<i8").tobytes()),
    )


def write_shard(folder: Path, shard: Shard) -> None:
    """Declare a shard finished by writing its record."""
    write_file(folder / shard.record_name, msgspec.json.encode(shard))


def write_manifest(folder: Path, manifest: Manifest) -> Manifest:
    """Write the manifest, its fingerprint over every checksum filled in, and rename it into place."""
    sealed = msgspec.structs.replace(manifest, fingerprint=_fingerprint(manifest))
    write_file(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(sealed), indent=1))
    return sealed


def read_shard(folder: Path, stream: str, index: int) -> Shard | None:
    """A finished shard, or None where it is missing or not as its record says."""
    try:
        shard = msgspec.json.decode((folder / f"{stream}-{index:05d}.json").read_bytes(), type=Shard)
    except (OSError, msgspec.MsgspecError):
        return None
    files = [f for p in shard.parts.values() for f in (p.tokens, p.starts)]
    return shard if all(damage(folder, f, verify=True) is None for f in files) else None


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a finished folder.

    Raises:
        DataError: there is none, it is damaged, or of another format version.
    """
    path = folder / MANIFEST
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        raise DataError(f"{folder} holds no finished token shards", key="data.cache_dir", hint=_PREPARE) from None
    except (OSError, msgspec.MsgspecError) as error:
        raise DataError(f"{path} is damaged: {error}", key="data.cache_dir", hint=_PREPARE) from None
    if manifest.schema != SCHEMA:
        raise DataError(
            f"{path} is {manifest.schema}, this version reads {SCHEMA}", key="data.cache_dir", hint=_PREPARE
        )
    if manifest.fingerprint != _fingerprint(manifest):
        raise DataError(f"{path} does not match its own fingerprint", key="data.cache_dir", hint=_PREPARE)
    return manifest


def check_files(folder: Path, manifest: Manifest, *, verify: bool = False) -> list[str]:
    """What is wrong with the files: sizes, checksums of small files, with `verify` of all."""
    found = (damage(folder, file, verify=verify) for file in manifest.files())
    return [text for text in found if text is not None]


def check_tokenizer(manifest: Manifest, fingerprint: str, name: str) -> None:
    """Refuse shards that another tokenizer made.

    Raises:
        DataError: the fingerprints differ; the text holds both.
    """
    made = manifest.tokenizer
    if made.fingerprint != fingerprint:
        raise DataError(
            f"the shards were made by tokenizer {made.name} ({made.fingerprint}), the job's is {name} ({fingerprint})",
            key="data.tokenizer",
            values={"shards": made.fingerprint, "job": fingerprint},
            hint=f"Set data.tokenizer = {made.name}, or prepare the text again: paceline data prepare.",
        )


def damage(folder: Path, file: File, *, verify: bool) -> str | None:
    """Why a file must not be used, or None."""
    path = folder / file.name
    try:
        size = path.stat().st_size
    except OSError as error:
        return f"{path}: {error.strerror}"
    if size != file.size_bytes:
        return f"{path} has {size} bytes instead of {file.size_bytes}"
    if (verify or size <= SMALL_FILE_BYTES) and file_sha256(path) != file.sha256:
        return f"{path}: the checksum is not that of the manifest"
    return None


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_file(path: Path, content: bytes | memoryview) -> File:
    """Write a file whole: to a temporary name, flushed to the disk, renamed, the folder flushed.

    Raises:
        DiskFull: no space is left; the temporary file is removed.
        DataError: the folder cannot be written.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise write_error(path, error, len(content)) from None
    return File(path.name, len(content), hashlib.sha256(content).hexdigest())


def write_error(path: Path, error: OSError, size_bytes: int = 0) -> DataError | DiskFull:
    """The error of the tree for an OSError met while writing below the cache folder."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = _free_bytes(path.parent)
        return DiskFull(
            f"no space is left for {path} ({format_bytes(size_bytes)}; {format_bytes(free)} free)",
            key="data.cache_dir",
            values={"path": str(path), "needed_bytes": size_bytes, "free_bytes": free},
            hint="Free some space, or set data.cache_dir to another disk; finished shards are kept and reused.",
        )
    return DataError(
        f"cannot write {path}: {error.strerror or error}",
        key="data.cache_dir",
        values={"path": str(path)},
        hint="Set data.cache_dir to a folder that you may write.",
    )


def _free_bytes(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _fingerprint(manifest: Manifest) -> str:
    """Of what the shards hold, not of where they came from: equal on every machine that read the same text."""
    content = [manifest.schema, manifest.tokenizer, manifest.token_dtype, manifest.shards]
    content.append([(s.stream, s.splits) for s in manifest.streams])
    return hashlib.sha256(msgspec.json.encode(content)).hexdigest()[:32]

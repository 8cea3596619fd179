"""From sources to token shards in the cache folder, and from the folder to datasets. Imports no torch.

The folder's name is a digest of all that decides what is in it: the files with their sizes and times, the tokenizer,
and the held-out share. Changed text makes a new folder; the same job finds its own again and opens it in
milliseconds.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from paceline.data import shards
from paceline.data.build import Build, StreamPlan
from paceline.data.config import DataSection, sources_of
from paceline.data.dataset import PartFiles, TokenDataset, TokenStream
from paceline.data.lock import builder_lock
from paceline.data.progress import Progress, shown
from paceline.data.shards import Manifest
from paceline.data.sources import OpenSource, open_source
from paceline.data.tokenizer import BytesTokenizer, FileTokenizer, Tokenizer, open_tokenizer
from paceline.errors import DataError

TRAIN = "train"
BYTES = "bytes"
BPE = "bpe:"


@dataclass(frozen=True)
class PreparedData:
    """What a job trains and evaluates on, opened.

    Attributes:
        tokenizer: the one that made the shards.
        train: the training set.
        evals: eval sets by name; the held-out one is `eval`.
        manifest: what the cache folder holds; `manifest.fingerprint` is equal wherever the same text was read.
        folder: the cache folder.
    """

    tokenizer: Tokenizer
    train: TokenDataset
    evals: dict[str, TokenDataset]
    manifest: Manifest
    folder: Path


@dataclass(frozen=True)
class _Plan:
    """What a section asks for, its files found."""

    section: DataSection
    streams: list[StreamPlan]
    folder: Path
    key: str


def prepare(section: DataSection, *, progress: Progress | None = None) -> PreparedData:
    """Open the data of a section, and build what is missing first.

    One process per file system builds; others wait while it makes progress, and open the same files.

    Args:
        section: the job's `[data]`.
        progress: see `progress.Progress`; by default a bar or lines on stderr.

    Raises:
        DataError: a source is empty, missing, unreadable or has another field; the tokenizer does not match; a
        sequence is
            longer than the data.
        DiskFull: no space is left in the cache.
    """
    ready_made = _prepared_folder(section)
    if ready_made is not None:
        return _open(section, ready_made, _checked_manifest(ready_made))
    plan = _plan(section)
    try:
        manifest = _checked_manifest(plan.folder)
    except DataError:
        manifest = _build_alone(plan, progress)
    return _open(section, plan.folder, manifest)


def open_prepared(section: DataSection) -> PreparedData:
    """Open the data of a section without building anything.

    Raises:
        DataError: it has not been prepared, or is damaged.
    """
    folder = _prepared_folder(section) or _plan(section).folder
    return _open(section, folder, _checked_manifest(folder))


def cache_folder(section: DataSection) -> Path:
    """Where the section's shards are, or would be."""
    return _prepared_folder(section) or _plan(section).folder


def cache_root(section: DataSection) -> Path:
    """`data.cache_dir`, or the user's own cache folder."""
    if section.cache_dir is not None:
        return Path(section.cache_dir).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "paceline" / "data"


def _plan(section: DataSection) -> _Plan:
    streams = [
        StreamPlan(f"{TRAIN}-{k}", open_source(source, "data.source", section.text_key), TRAIN, section.eval_fraction)
        for k, source in enumerate(sources_of(section.source))
    ]
    for name, spec in section.eval.items():
        key = f"data.eval.{name}"
        opened = [open_source(source, key, section.text_key) for source in sources_of(spec)]
        streams += [StreamPlan(f"{_file_name(name)}-{k}", source, name, 0.0) for k, source in enumerate(opened)]
    _check_text_key(section, [s.source for s in streams])
    content = [shards.SCHEMA, _tokenizer_key(section), section.eval_fraction]
    content.append([(s.stream, s.split, s.source.identity()) for s in streams])
    key = hashlib.sha256(msgspec.json.encode(content)).hexdigest()[:24]
    return _Plan(section, streams, cache_root(section) / key, key)


def _check_text_key(section: DataSection, sources: list[OpenSource]) -> None:
    if section.text_key is not None and not any(s.is_keyed for s in sources):
        raise DataError(
            f"{section.text_key!r} has no effect: no source has fields (.jsonl, .parquet or hf:)",
            key="data.text_key",
            values={"text_key": section.text_key},
            hint="Leave data.text_key out.",
        )


def _file_name(name: str) -> str:
    """An eval set's name as part of a file name, apart from `train` and from other names."""
    plain = "".join(c if c.isalnum() else "_" for c in name)
    return f"eval-{plain}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"


def _tokenizer_key(section: DataSection) -> str:
    if section.tokenizer == BYTES or section.tokenizer.startswith(BPE):
        return section.tokenizer
    return open_tokenizer(Path(section.tokenizer).expanduser()).fingerprint


def _checked_manifest(folder: Path) -> Manifest:
    manifest = shards.read_manifest(folder)
    damaged = shards.check_files(folder, manifest)
    if manifest.tokenizer.name != BYTES and not (folder / shards.TOKENIZER).is_file():
        damaged.append(f"{folder / shards.TOKENIZER} is missing")
    if damaged:
        raise DataError(
            f"the token shards are damaged: {damaged[0]}" + (f", and {len(damaged) - 1} more" if damaged[1:] else ""),
            key="data.cache_dir",
            values={"folder": str(folder), "damage": damaged},
            hint="Run paceline data prepare to build them again.",
        )
    return manifest


def _build_alone(plan: _Plan, progress: Progress | None) -> Manifest:
    try:
        plan.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise shards.write_error(plan.folder, error) from None
    with (
        shown(progress) as show,
        builder_lock(
            plan.folder.with_suffix(".lock"), lambda builder: show(f"waiting for {builder} to prepare it", 0, None)
        ) as beat,
    ):
        try:
            return _checked_manifest(plan.folder)
        except DataError as error:
            if (plan.folder / shards.MANIFEST).exists():
                show(f"building again, for {error.message}", 0, None)

        def moved(what: str, done: int, total: int | None) -> None:
            beat()
            show(what, done, total)

        return Build(plan.section.tokenizer, plan.streams, plan.folder, plan.key, moved).run()


def _open(section: DataSection, folder: Path, manifest: Manifest) -> PreparedData:
    tokenizer = _open_tokenizer(section, folder, manifest)
    weights = None if _prepared_folder(section) else [s.weight for s in sources_of(section.source)]
    weighted = [w for w in weights or [] if w is not None]
    names = [s.stream for s in manifest.streams if TRAIN in s.splits]
    if weighted:
        streams = [_stream(folder, manifest, TRAIN, [name]) for name in names]
    else:
        streams = [_stream(folder, manifest, TRAIN, names)]
    vocabulary, length = manifest.tokenizer.vocabulary, section.sequence_length
    train = TokenDataset(streams, length, vocabulary, weighted or None, TRAIN)
    evals = {
        split: TokenDataset([_stream(folder, manifest, split, None)], length, vocabulary, None, split)
        for split in manifest.splits()
        if split != TRAIN
    }
    return PreparedData(tokenizer, train, evals, manifest, folder)


def _stream(folder: Path, manifest: Manifest, split: str, names: list[str] | None) -> TokenStream:
    own = [s.stream for s in manifest.streams if split in s.splits] if names is None else names
    return TokenStream(
        [
            PartFiles(folder / p.tokens.name, folder / p.starts.name, p.token_count, p.documents, manifest.token_dtype)
            for name in own
            for p in manifest.parts(split, name)
        ]
    )


def _open_tokenizer(section: DataSection, folder: Path, manifest: Manifest) -> Tokenizer:
    """The shards' own tokenizer, after the job's has been compared with it."""
    made = manifest.tokenizer
    if section.tokenizer.startswith(BPE):
        kept = made.fingerprint if made.name != section.tokenizer else _kept(folder).fingerprint
        job = f"not trained here, {section.tokenizer}" if made.name != section.tokenizer else kept
        shards.check_tokenizer(manifest, job, section.tokenizer)
    elif section.tokenizer == BYTES:
        shards.check_tokenizer(manifest, BytesTokenizer.fingerprint, BYTES)
    else:
        named = open_tokenizer(Path(section.tokenizer).expanduser())
        shards.check_tokenizer(manifest, named.fingerprint, section.tokenizer)
    return BytesTokenizer() if made.name == BYTES else _kept(folder, (made.vocabulary, made.separator))


def _kept(folder: Path, sizes: tuple[int, int] | None = None) -> FileTokenizer:
    return FileTokenizer(folder / shards.TOKENIZER, sizes)


def _prepared_folder(section: DataSection) -> Path | None:
    """The folder, where the source is one that `paceline data prepare` made."""
    if not isinstance(section.source, str):
        return None
    folder = Path(section.source).expanduser()
    if not (folder / shards.MANIFEST).is_file():
        return None
    if section.eval:
        raise DataError(
            f"{folder} holds prepared shards with their own eval sets; data.eval has no effect beside it",
            key="data.eval",
            hint="Leave data.eval out, or prepare the text again with it.",
        )
    return folder

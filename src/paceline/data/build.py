"""Building the token shards of one cache folder, from where an interruption left it. Imports no torch.

Legend: a piece is some text of a document (see `sources`); a shard is a run of pieces with at least
`SHARD_TEXT_BYTES` of text, so its borders depend on the text alone and a finished shard can be kept.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.data import shards
from paceline.data.config import HELD_OUT
from paceline.data.progress import Progress
from paceline.data.shards import Manifest, Part, Shard, StreamRecord, TokenizerRecord
from paceline.data.sources import OpenSource, Piece
from paceline.data.split import is_held_out
from paceline.data.tokenizer import (
    BytesTokenizer,
    FileTokenizer,
    ParallelTokenizing,
    Tokenizer,
    open_tokenizer,
    train_bpe,
)
from paceline.errors import DataError
from paceline.units import MiB

SHARD_TEXT_BYTES = 64 * MiB
BPE_TEXT_BYTES = 512 * MiB
"""A BPE tokenizer is trained on this much text at most, from the start of each source in turn."""
_BATCH_CHARACTERS = 1 * MiB


@dataclass(frozen=True)
class StreamPlan:
    """A source on its way into shards.

    Attributes:
        stream: prefix of its file names.
        source: where the text comes from.
        split: set that its pieces go to.
        held_out: share of the pieces that go to the held-out eval set instead.
    """

    stream: str
    source: OpenSource
    split: str
    held_out: float

    def split_of(self, index: int) -> str:
        """The set that piece `index` belongs to."""
        return HELD_OUT if is_held_out(index, self.held_out) else self.split

    @property
    def splits(self) -> list[str]:
        """All sets that its pieces go to."""
        return [self.split, HELD_OUT] if self.held_out else [self.split]


@dataclass
class _Growing:
    """Tokens of one split of a shard that is being built."""

    tokens: list[npt.NDArray[Any]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    token_count: int = 0

    def add(self, ids: npt.NDArray[Any], separator: int | None, dtype: str) -> None:
        """Append a piece; with a separator where it begins a document."""
        if separator is not None:
            self.starts.append(self.token_count)
            self.tokens.append(np.asarray([separator], dtype))
            self.token_count += 1
        self.tokens.append(ids.astype(dtype))
        self.token_count += ids.size


class Build:
    """One build of one folder; the caller holds the folder's lock."""

    def __init__(self, tokenizer: str, streams: list[StreamPlan], folder: Path, key: str, progress: Progress) -> None:
        self.tokenizer_name = tokenizer
        self.streams = streams
        self.folder = folder
        self.key = key
        self.progress = progress

    def run(self) -> Manifest:
        """Build what is not there yet.

        Raises:
            DataError: a source or set is empty, or unreadable.
            DiskFull: no space is left.
        """
        for leftover in self.folder.glob("*.part"):
            leftover.unlink(missing_ok=True)
        with ParallelTokenizing():
            tokenizer = self._tokenizer()
            built = [shard for plan in self.streams for shard in self._stream(plan, tokenizer)]
        manifest = Manifest(
            schema=shards.SCHEMA,
            key=self.key,
            tokenizer=TokenizerRecord(
                self.tokenizer_name, tokenizer.fingerprint, tokenizer.vocabulary, tokenizer.separator
            ),
            token_dtype=shards.token_dtype(tokenizer.vocabulary),
            streams=[StreamRecord(p.stream, p.source.name, p.splits) for p in self.streams],
            shards=built,
        )
        self._check_sets(manifest)
        return shards.write_manifest(self.folder, manifest)

    def _tokenizer(self) -> Tokenizer:
        kept = self.folder / shards.TOKENIZER
        if self.tokenizer_name == "bytes":
            return BytesTokenizer()
        if not self.tokenizer_name.startswith("bpe:"):
            named = open_tokenizer(Path(self.tokenizer_name).expanduser())
            shards.write_file(kept, named.to_json())
            return FileTokenizer(kept)
        if not kept.is_file():
            vocabulary = int(self.tokenizer_name.removeprefix("bpe:"))
            self.progress(f"training a tokenizer of {vocabulary} ids", 0, None)
            try:
                train_bpe(self._training_texts(), vocabulary, kept)
            except OSError as error:
                raise shards.write_error(kept, error) from None
        return FileTokenizer(kept)

    def _training_texts(self) -> Iterator[str]:
        what, seen = "reading text for the tokenizer", 0
        plans = [p for p in self.streams if p.split == "train"]
        total = _total([p.source for p in plans])
        for plan in plans:
            taken = 0
            for index, piece in enumerate(plan.source.pieces()):
                if taken >= BPE_TEXT_BYTES // len(plans):
                    break
                if plan.split_of(index) == plan.split:
                    taken += len(piece.text)
                    yield piece.text
                seen += len(piece.text)
                self.progress(what, seen, total)

    def _stream(self, plan: StreamPlan, tokenizer: Tokenizer) -> list[Shard]:
        """The shards of one source: those that are whole are kept, the rest is built."""
        finished: list[Shard] = []
        while (shard := shards.read_shard(self.folder, plan.stream, len(finished))) is not None:
            finished.append(shard)
        done = sum(s.pieces for s in finished)
        pieces = enumerate(plan.source.pieces())
        rest = islice(pieces, done, None)
        read = sum(s.text_bytes for s in finished)
        while True:
            shard = self._shard(plan, tokenizer, len(finished), rest, read)
            if shard.pieces == 0:
                break
            shards.write_shard(self.folder, shard)
            finished.append(shard)
            read += shard.text_bytes
        if not finished:
            raise DataError(
                f"{plan.source.name} holds no text",
                key=plan.source.key,
                values={"source": plan.source.name, "files": len(plan.source.files)},
                hint="Give a source with text in it.",
            )
        return finished

    def _shard(
        self, plan: StreamPlan, tokenizer: Tokenizer, index: int, pieces: Iterator[tuple[int, Piece]], read: int
    ) -> Shard:
        growing = {split: _Growing() for split in plan.splits}
        dtype = shards.token_dtype(tokenizer.vocabulary)
        count = text_bytes = 0
        what, total = f"tokenizing {plan.source.name}", plan.source.size_bytes
        for group in _groups(pieces):
            for (place, piece), ids in zip(group, tokenizer.encode_batch([p.text for _, p in group]), strict=True):
                split = plan.split_of(place)
                goes_on = piece.continues and plan.split_of(place - 1) == split
                growing[split].add(ids, None if goes_on else tokenizer.separator, dtype)
                count += 1
                text_bytes += len(piece.text.encode("utf-8", "surrogatepass"))
            self.progress(what, read + text_bytes, total)
            if text_bytes >= SHARD_TEXT_BYTES:
                break
        stem = f"{plan.stream}-{index:05d}"
        parts = {
            split: self._write(f"{stem}.{k}", g, dtype) for k, (split, g) in enumerate(growing.items()) if g.tokens
        }
        return Shard(plan.stream, index, count, text_bytes, parts)

    def _write(self, stem: str, growing: _Growing, dtype: str) -> Part:
        tokens = np.concatenate(growing.tokens).astype(dtype, copy=False)
        return shards.write_part(self.folder, stem, tokens, np.asarray(growing.starts, np.int64))

    def _check_sets(self, manifest: Manifest) -> None:
        pieces = sum(s.pieces for s in manifest.shards)
        for split in manifest.splits():
            if any(manifest.parts(split, s.stream) for s in manifest.streams):
                continue
            shutil.rmtree(self.folder, ignore_errors=True)
            share = max((p.held_out for p in self.streams), default=0.0)
            raise DataError(
                f"{share} of {pieces} pieces of text holds nothing out for evaluation"
                if split == HELD_OUT and share
                else f"the {split} set is empty: all {pieces} pieces of text are held out",
                key="data.eval_fraction",
                values={"eval_fraction": share, "pieces": pieces, "set": split},
                hint="Give more text, name an eval set (data.eval.<name> = FILE), or set data.eval_fraction = 0."
                if split == HELD_OUT
                else "Set data.eval_fraction lower, or give more text.",
            )


def _groups(pieces: Iterator[tuple[int, Piece]]) -> Iterator[list[tuple[int, Piece]]]:
    """Pieces in runs of about a million characters, enough to keep a tokenizer's threads busy."""
    group: list[tuple[int, Piece]] = []
    size = 0
    for numbered in pieces:
        group.append(numbered)
        size += len(numbered[1].text)
        if size >= _BATCH_CHARACTERS:
            yield group
            group, size = [], 0
    if group:
        yield group


def _total(sources: list[OpenSource]) -> int | None:
    sizes = [s.size_bytes for s in sources]
    return None if None in sizes else sum(s for s in sizes if s is not None)

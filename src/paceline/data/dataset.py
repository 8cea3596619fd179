"""Sequences out of token shards, as a map-style dataset that any process can open. Imports no torch.

The stream of a set is its documents one after the other, each beginning with the separator. Sample i is tokens i*L ..
i*L+L of that stream (L = sequence length): inputs are the first L, labels the last L, so every token but the first is
a label exactly once. What is left at the end,
shorter than a sample, is not read. Nothing is masked: the label of a document's last token is the separator that
begins the next one, which is how an end is learnt, and the label of a separator is the first token of its own
document.

Legend: B samples, L tokens of a sample, K document borders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.data import order
from paceline.errors import DataError

Batch = dict[str, npt.NDArray[Any]]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PartFiles:
    """The two files of one part of a stream."""

    tokens: Path
    starts: Path
    token_count: int
    documents: int
    dtype: str


class TokenStream:
    """Parts of token shards as one long array; mapped when first read, so that it is cheap to send to a process."""

    def __init__(self, parts: Sequence[PartFiles]) -> None:
        self.parts = list(parts)
        self._first = np.concatenate([[0], np.cumsum([p.token_count for p in self.parts])]).astype(np.int64)
        self._maps: list[tuple[npt.NDArray[Any], Int64]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": None}

    @property
    def token_count(self) -> int:
        """Tokens in the stream."""
        return int(self._first[-1])

    @property
    def documents(self) -> int:
        """Documents that begin in the stream."""
        return sum(p.documents for p in self.parts)

    def read(self, start: int, out: npt.NDArray[Any]) -> None:
        """Copy `out.size` tokens from `start` on, across the parts' borders."""
        filled, part = 0, int(np.searchsorted(self._first, start, side="right")) - 1
        while filled < out.size:
            tokens = self._mapped()[part][0]
            local = start + filled - int(self._first[part])
            taken = tokens[local : local + out.size - filled]
            out[filled : filled + taken.size] = taken
            filled, part = filled + taken.size, part + 1

    def starts(self, start: int, stop: int) -> Int64:
        """Places in `start` .. `stop`-1 at which documents begin."""
        found = []
        part = int(np.searchsorted(self._first, start, side="right")) - 1
        while part < len(self.parts) and self._first[part] < stop:
            first, places = int(self._first[part]), self._mapped()[part][1]
            low, high = np.searchsorted(places, (start - first, stop - first))
            found.append(places[low:high] + first)
            part += 1
        return np.concatenate(found) if len(found) != 1 else found[0]

    def tokens(self, limit: int | None = None) -> npt.NDArray[Any]:
        """All tokens, or the first `limit`, as one array (a view where there is one part)."""
        arrays = [tokens for tokens, _ in self._mapped()]
        whole = arrays[0] if len(arrays) == 1 else np.concatenate(arrays) if arrays else np.empty(0, np.uint16)
        return whole[:limit]

    def _mapped(self) -> list[tuple[npt.NDArray[Any], Int64]]:
        if self._maps is None:
            self._maps = [
                (_map(p.tokens, p.dtype, p.token_count), _map(p.starts, "<i8", p.documents)) for p in self.parts
            ]
        return self._maps


class TokenDataset:
    """Samples of `sequence_length` tokens over one stream, or over several that are mixed by weight.

    Args:
        streams: of one set; samples are numbered through them.
        sequence_length: L.
        vocabulary: number of token ids.
        weights: one per stream, or None for each sample once per epoch.
        name: `train` or the eval set's name, for messages.

    Raises:
        DataError: a stream has fewer than L + 1 tokens.
    """

    quick = True
    """A batch costs microseconds, so the first ones can be made while the loader's workers start."""

    def __init__(
        self,
        streams: Sequence[TokenStream],
        sequence_length: int,
        vocabulary: int,
        weights: Sequence[float] | None = None,
        name: str = "train",
    ) -> None:
        self.streams = list(streams)
        self.sequence_length = sequence_length
        self.vocabulary = vocabulary
        self.weights = list(weights) if weights is not None else None
        self.name = name
        self.sizes = [max(0, s.token_count - 1) // sequence_length for s in self.streams]
        self._first = np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int64)
        if not self.sizes or min(self.sizes) < 1:
            shortest = min((s.token_count for s in self.streams), default=0)
            raise DataError(
                f"a sequence of {sequence_length} tokens needs {sequence_length + 1}, the {name} set has {shortest}",
                key="data.sequence_length",
                values={"sequence_length": sequence_length, "tokens": shortest, "set": name},
                hint=_shorter(shortest, name),
            )

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, index: int) -> Batch:
        """`tokens` and `labels` (L, int64), `document_starts` (K, int64: where documents begin in the sample)."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        stream, start = self._place(index % len(self))
        window = np.empty(self.sequence_length + 1, np.int64)
        stream.read(start, window)
        starts = stream.starts(start, start + self.sequence_length) - start
        return {"tokens": window[:-1], "labels": window[1:], "document_starts": starts}

    @property
    def token_count(self) -> int:
        """Tokens of all streams."""
        return sum(s.token_count for s in self.streams)

    @property
    def documents(self) -> int:
        """Documents of all streams."""
        return sum(s.documents for s in self.streams)

    def indices_at(self, seed: int, positions: npt.ArrayLike) -> Int64:
        """The samples at positions of the endless stream of epochs: a pure function of (seed, position)."""
        if self.weights is None:
            return order.samples_at(seed, positions, len(self))
        return order.mixture_at(seed, positions, self.sizes, self.weights)

    def batch(self, indices: npt.ArrayLike) -> Batch:
        """Samples as one batch.

        Returns:
            `tokens` and `labels` (B, L, int64), `sample_ids` (B, int64). Where a document begins inside a sample also
            `cumulative` (int32, from 0 to B*L: the ends of documents in the flattened tokens, each sample's end being
            one) and `max_length` (the longest of them, int64 without dimensions).
        """
        samples_B = np.asarray(indices, dtype=np.int64)
        length = self.sequence_length
        window_BL1 = np.empty((samples_B.size, length + 1), np.int64)
        borders = []
        for row, index in enumerate(samples_B.tolist()):
            stream, start = self._place(index)
            stream.read(start, window_BL1[row])
            inside = stream.starts(start + 1, start + length)
            if inside.size:
                borders.append(inside + (row * length - start))
        batch: Batch = {
            "tokens": np.ascontiguousarray(window_BL1[:, :-1]),
            "labels": np.ascontiguousarray(window_BL1[:, 1:]),
            "sample_ids": samples_B,
        }
        if borders:
            rows = np.arange(samples_B.size + 1, dtype=np.int64) * length
            cumulative = np.sort(np.concatenate([rows, *borders]))
            batch["cumulative"] = cumulative.astype(np.int32)
            batch["max_length"] = np.asarray(np.diff(cumulative).max(), dtype=np.int64)
        return batch

    def _place(self, index: int) -> tuple[TokenStream, int]:
        k = 0 if len(self.streams) == 1 else int(np.searchsorted(self._first, index, side="right")) - 1
        return self.streams[k], (index - int(self._first[k])) * self.sequence_length


def _map(path: Path, dtype: str, count: int) -> npt.NDArray[Any]:
    if count == 0:
        return np.empty(0, dtype)
    try:
        return np.asarray(np.memmap(path, dtype=dtype, mode="r", shape=(count,)))
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot map {path}: {error}",
            key="data.cache_dir",
            values={"path": str(path)},
            hint="Run paceline data prepare to build it again.",
        ) from None


def _shorter(tokens: int, name: str) -> str:
    more = "more text" if name == "train" else f"more text for it (data.eval_fraction, data.eval.{name})"
    return f"Set data.sequence_length to {tokens - 1} or less, or give {more}." if tokens > 1 else f"Give {more}."

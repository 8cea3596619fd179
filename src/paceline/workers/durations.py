"""How long each section of a worker's life has taken: counts over a scale of durations, kept in a worker's mapped page.

A worker counts, which costs it well under a microsecond; its supervisor reads the counts and learns limits from them.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

Section = Literal["start", "compile", "step", "evaluation", "save", "restore", "data"]
"""What a worker is at. The first steps of a process are `compile`, whether or not anything is compiled in them."""

SECTIONS: tuple[Section, ...] = get_args(Section)

BINS = 96
_PER_DECADE = 16
_SHORTEST_SECONDS = 1e-3
_COUNTS = struct.Struct(f"={len(SECTIONS) * BINS}I")
_LONGEST = struct.Struct(f"={len(SECTIONS)}d")
SIZE_BYTES = _COUNTS.size + _LONGEST.size


class Durations(NamedTuple):
    """Of one section: how many durations fell into each bin, and the longest one in seconds."""

    counts: tuple[int, ...] = (0,) * BINS
    longest: float = 0.0

    @property
    def number(self) -> int:
        return sum(self.counts)

    def quantile(self, share: float) -> float:
        """The duration in seconds that `share` of all stay below, to 7%; 0.0 where there is none."""
        if not (total := self.number):
            return 0.0
        wanted = max(1, math.ceil(share * total))
        reached = 0
        for index, count in enumerate(self.counts):
            reached += count
            if reached >= wanted:
                return min(_middle_of(index), self.longest)
        return self.longest

    def plus(self, other: Durations) -> Durations:
        """Of both."""
        counts = tuple(a + b for a, b in zip(self.counts, other.counts, strict=True))
        return Durations(counts, max(self.longest, other.longest))


NONE = Durations()


def durations_of(seconds: Sequence[float]) -> Durations:
    """As a worker would count them."""
    counts = [0] * BINS
    for one in seconds:
        counts[bin_of(one)] += 1
    return Durations(tuple(counts), max(seconds, default=0.0))


def count(page: mmap.mmap, offset: int, section: int, seconds: float) -> None:
    """In a worker: one more duration of a section (its index)."""
    at = offset + 4 * (section * BINS + bin_of(seconds))
    (before,) = struct.unpack_from("=I", page, at)
    struct.pack_into("=I", page, at, before + 1)
    at = offset + _COUNTS.size + 8 * section
    (longest,) = struct.unpack_from("=d", page, at)
    if seconds > longest:
        struct.pack_into("=d", page, at, seconds)


def read(page: bytes, offset: int) -> dict[Section, Durations]:
    """What a worker has counted so far."""
    counts = _COUNTS.unpack_from(page, offset)
    longest = _LONGEST.unpack_from(page, offset + _COUNTS.size)
    return {section: Durations(counts[i * BINS : (i + 1) * BINS], longest[i]) for i, section in enumerate(SECTIONS)}


def bin_of(seconds: float) -> int:
    """The bin of a duration: 16 to a decade from a millisecond on, the last one without an end."""
    if seconds <= _SHORTEST_SECONDS:
        return 0
    return min(BINS - 1, int(_PER_DECADE * math.log10(seconds / _SHORTEST_SECONDS)))


def _middle_of(index: int) -> float:
    return float(_SHORTEST_SECONDS * 10 ** ((index + 0.5) / _PER_DECADE))

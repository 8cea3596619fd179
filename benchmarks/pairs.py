"""The arithmetic of two sides measured in turn: ratio of each pair, median, bootstrap interval, when there is enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000


@dataclass(frozen=True)
class Interval:
    """A median and its 95% bootstrap interval (percentile method, Efron 1979)."""

    median: float
    low: float
    high: float

    @property
    def width(self) -> float:
        return self.high - self.low

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Budget:
    """How many pairs are measured: at least `min_pairs`, then until the interval is narrow, or pairs or time run out."""

    min_pairs: int = 12
    max_pairs: int = 60
    width: float = 0.04
    max_seconds: float = 75.0

    def enough(self, ratios: Sequence[float], elapsed_seconds: float) -> bool:
        """Whether no further pair is wanted."""
        if len(ratios) < self.min_pairs:
            return False
        if len(ratios) >= self.max_pairs or elapsed_seconds >= self.max_seconds:
            return True
        return bootstrap_median(ratios).width < self.width


def bootstrap_median(values: Sequence[float], resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """Median of `values`, with the 2.5th and 97.5th percentile of the medians of resamples with replacement.

    Raises:
        ValueError: no values.
    """
    sample = np.asarray(values, dtype=np.float64)
    if sample.size == 0:
        raise ValueError("a median of nothing")
    drawn = np.random.default_rng(seed).integers(0, sample.size, (resamples, sample.size))
    low, high = np.percentile(np.median(sample[drawn], axis=1), (2.5, 97.5))
    return Interval(float(np.median(sample)), float(low), float(high))


def speed_ratios(seconds: Sequence[tuple[float, float]]) -> list[float]:
    """For pairs of seconds for the same work: how many times faster the first side was."""
    return [second / first for first, second in seconds]


def first_goes_first(pair: int) -> bool:
    """Order inside a pair: A B, B A, A B, ... so that neither side always follows the other."""
    return pair % 2 == 0


def relative_difference(one: float, other: float) -> float:
    """|one - other| as a share of the larger."""
    largest = max(abs(one), abs(other))
    return abs(one - other) / largest if largest else 0.0

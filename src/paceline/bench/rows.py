"""A measured row: what nccl-tests print of one size, with median and spread. No torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import msgspec

from paceline.bench.sweep import REDUCING, ROOTED, TYPE_NAMES, Point
from paceline.cluster.measured import TierName
from paceline.parallel.strategy import CollectiveKind
from paceline.parallel.wire import bus_factor

GB = 1e9
MANY_ROUNDS = 8
QUARTILES_APART = 1.349
"""Standard deviations between the quartiles of a normal distribution."""


class Row(msgspec.Struct, frozen=True):
    """One size of one collective on one tier.

    `time_us` is the median over blocks of back-to-back calls, per call, of the slowest rank; `spread` half the distance of
    its quartiles as a share of it, `drift` how far the medians of whole rounds are apart: their standard deviation as a
    share. Bandwidths in GB/s (10^9). `wrong` counts wrong elements on all ranks.
    """

    collective: CollectiveKind
    tier: TierName
    size_bytes: int
    count: int
    type: str
    redop: str
    root: int
    ranks: int
    nodes: int
    time_us: float
    spread: float
    drift: float
    rounds: int
    trials: int
    algorithm_bandwidth: float
    bus_bandwidth: float
    wrong: int
    in_place: bool

    @property
    def seconds(self) -> float:
        return self.time_us * 1e-6

    @property
    def key(self) -> tuple[str, str, int]:
        """What a row replaces, and what it is compared with."""
        return self.tier, self.collective, self.size_bytes


def make_row(
    point: Point, tier: TierName, ranks: int, nodes: int, dtype: str, rounds: Sequence[Sequence[float]], wrong: int
) -> Row:
    """The row of a point from seconds per call, one per block, by round."""
    samples = [seconds for one in rounds for seconds in one]
    seconds = statistics.median(samples)
    rate = point.size_bytes / seconds / GB
    return Row(
        collective=point.collective, tier=tier, size_bytes=point.size_bytes, count=point.count, type=TYPE_NAMES[dtype],
        redop="sum" if point.collective in REDUCING else "none", root=0 if point.collective in ROOTED else -1,
        ranks=ranks, nodes=nodes, time_us=seconds * 1e6, spread=spread_of(samples), drift=drift_of(rounds),
        rounds=len(rounds), trials=len(samples),
        algorithm_bandwidth=rate, bus_bandwidth=rate * bus_factor(point.collective, ranks), wrong=wrong,
        in_place=point.collective in ("all_reduce", "broadcast"),
    )  # fmt: skip


def spread_of(samples: Sequence[float]) -> float:
    """Half the distance between the quartiles over the median; 0 of fewer than two samples."""
    if len(samples) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / 2 / middle


def drift_of(rounds: Sequence[Sequence[float]]) -> float:
    """Standard deviation of the rounds' medians over their median; 0 of fewer than two rounds.

    Of many rounds it is that of a normal distribution with their quartiles, on which a few rounds beside other work have
    no effect: they have none on the median either.
    """
    medians = [statistics.median(one) for one in rounds if one]
    if len(medians) < 2:
        return 0.0
    if len(medians) < MANY_ROUNDS:
        return statistics.stdev(medians) / statistics.median(medians)
    low, middle, high = statistics.quantiles(medians, n=4, method="inclusive")
    return (high - low) / QUARTILES_APART / middle


def median_error(drift: float, rounds: int) -> float:
    """Standard error of the median of so many rounds, as a share of it (normal distribution, Kendall and Stuart 10.10)."""
    return math.sqrt(math.pi / 2 / rounds) * drift


def row_of(record: dict[str, Any]) -> Row:
    """A row from its record; raises `msgspec.ValidationError` where it is none."""
    return msgspec.convert(record, Row)


def newest(rows: Sequence[Row]) -> list[Row]:
    """Each row once, as it was told last, in the order in which the first ones came."""
    return list({row.key: row for row in rows}.values())

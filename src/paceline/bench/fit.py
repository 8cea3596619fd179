"""Latency and bandwidth fitted to a sweep, with the error that the fit states. No torch.

t(S) = alpha + S / beta (Hockney 1994), fitted to relative residuals, so that small and large sizes count alike. Libraries
change their protocol, and caches their part, with the size: where one line is not within `WANTED_ERROR` of all sizes, the
sizes are cut into as few pieces as give that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from paceline.bench.rows import Row, median_error
from paceline.cluster.measured import LARGE_BYTES, Fit, Piece

WANTED_ERROR = 0.07
"""Relative residual above which a piece is cut in two."""

MIN_PIECE = 3
MAX_PIECES = 4


INSIDE = 1.645
"""Standard deviations within which 9 of 10 draws of a normal distribution are."""


class Sample(NamedTuple):
    """A size and its seconds per call; `error` is the standard error of these, as a share."""

    size_bytes: int
    seconds: float
    error: float = 0.0


def fits_of(rows: Sequence[Row]) -> list[Fit]:
    """One fit per tier and collective that has at least `MIN_PIECE` sizes."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.tier, row.collective), []).append(row)
    return [fit_rows(group) for group in groups.values() if len(group) >= MIN_PIECE]


def fit_rows(rows: Sequence[Row]) -> Fit:
    """The fit of one collective on one tier."""
    samples = sorted(Sample(row.size_bytes, row.seconds, median_error(row.drift, row.rounds)) for row in rows)
    cuts = best_cuts(samples)
    pieces = pieces_of(samples, cuts)
    off = list(zip(samples, left_out(samples, cuts), strict=True))
    large = [one for one in off if one[0].size_bytes >= LARGE_BYTES]
    return Fit(
        collective=rows[0].collective, tier=rows[0].tier, ranks=rows[0].ranks, nodes=rows[0].nodes,
        latency_seconds=pieces[0].latency_seconds, bytes_per_second=pieces[-1].bytes_per_second,
        relative_error=stated_error(large), small_relative_error=stated_error([one for one in off if one not in large]),
        min_bytes=samples[0].size_bytes, max_bytes=samples[-1].size_bytes, pieces=pieces,
    )  # fmt: skip


def line(samples: Sequence[Sample]) -> tuple[float, float]:
    """alpha (seconds) and 1 / beta (seconds per byte), neither below 0, of the least relative residuals.

    Minimises the sum of ((alpha + S / beta) / t - 1)^2.
    """
    p = [1 / s.seconds for s in samples]
    q = [s.size_bytes / s.seconds for s in samples]
    pp, qq, pq = _dot(p, p), _dot(q, q), _dot(p, q)
    determinant = pp * qq - pq * pq
    if determinant > 1e-12 * pp * qq:
        alpha = (sum(p) * qq - sum(q) * pq) / determinant
        per_byte = (sum(q) * pp - sum(p) * pq) / determinant
        if alpha >= 0 and per_byte > 0:
            return alpha, per_byte
        if per_byte <= 0:
            # Time that does not grow: latency alone, and a bandwidth too large to matter.
            return sum(p) / pp, 1e-6 * sum(p) / pp / max(s.size_bytes for s in samples)
    return 0.0, sum(q) / qq


def residuals(samples: Sequence[Sample], alpha: float, per_byte: float) -> list[float]:
    """Relative ones: predicted over measured, less 1."""
    return [(alpha + per_byte * s.size_bytes) / s.seconds - 1 for s in samples]


def best_cuts(samples: Sequence[Sample]) -> list[int]:
    """Where to cut: as few pieces as bring every residual within `WANTED_ERROR`, else those with the least of them.

    Returns:
        The index of the first sample of each piece.
    """
    count = len(samples)
    worst: dict[tuple[int, int], float] = {}
    for begin in range(count):
        for end in range(begin + 1, count + 1):
            if end - begin >= MIN_PIECE or (begin, end) == (0, count):
                worst[begin, end] = max(map(abs, residuals(samples[begin:end], *line(samples[begin:end]))))
    # best[end]: the least worst residual of the samples before `end` in `pieces` pieces, and the cuts of it.
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    chosen: tuple[float, list[int]] = (math.inf, [0])
    for _ in range(MAX_PIECES):
        following: dict[int, tuple[float, list[int]]] = {}
        for (begin, end), error in worst.items():
            if begin not in best:
                continue
            candidate = (max(best[begin][0], error), [*best[begin][1], begin])
            if end not in following or candidate[0] < following[end][0]:
                following[end] = candidate
        best = following
        if count in best and best[count][0] < chosen[0]:
            chosen = best[count]
        if chosen[0] <= WANTED_ERROR:
            break
    return chosen[1]


def pieces_of(samples: Sequence[Sample], cuts: Sequence[int]) -> tuple[Piece, ...]:
    """The lines between the cuts; a piece begins half-way, in ratio, between two sizes."""
    found = []
    for begin, end in zip(cuts, [*cuts[1:], len(samples)], strict=True):
        alpha, per_byte = line(samples[begin:end])
        start = 0 if begin == 0 else round(math.sqrt(samples[begin - 1].size_bytes * samples[begin].size_bytes))
        found.append(Piece(start, alpha, 1 / per_byte))
    return tuple(found)


def left_out(samples: Sequence[Sample], cuts: Sequence[int]) -> list[float]:
    """Relative residual of each size where the fit is made without it, if its piece has enough others."""
    found = []
    for begin, end in zip(cuts, [*cuts[1:], len(samples)], strict=True):
        piece = list(samples[begin:end])
        for index, sample in enumerate(piece):
            others = piece[:index] + piece[index + 1 :] if len(piece) > MIN_PIECE else piece
            found.append(abs(residuals([sample], *line(others))[0]))
    return found


def stated_error(off: Sequence[tuple[Sample, float]]) -> float | None:
    """How far a repeat, or a size between, may be off: within it are 9 of 10, were what is seen here drawn anew.

    A size is off by its residual and by the errors of both medians, the fit's and the repeat's.
    """
    if not off:
        return None
    squares = [residual**2 + 2 * sample.error**2 for sample, residual in off]
    return INSIDE * math.sqrt(sum(squares) / len(squares))


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))

"""Latency and bandwidth fitted to a sweep, with the error that the fit states. No torch.

t(S) = alpha + S / beta (Hockney 1994), fitted to relative residuals, so that small and large sizes count alike. Libraries
change their protocol, and caches their part, with the size: where one line is not within `WANTED_ERROR` of all sizes, the
sizes are cut into as few pieces as give that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from paceline.bench.rows import Row
from paceline.cluster.measured import LARGE_BYTES, Fit, Piece

WANTED_ERROR = 0.07
"""Relative residual above which a piece is cut in two."""

MIN_PIECE = 3
MAX_PIECES = 4


class Sample(NamedTuple):
    """A size and its seconds per call, with their relative spread."""

    size_bytes: int
    seconds: float
    spread: float = 0.0


def fits_of(rows: Sequence[Row]) -> list[Fit]:
    """One fit per tier and collective that has at least `MIN_PIECE` sizes."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.tier, row.collective), []).append(row)
    return [fit_rows(group) for group in groups.values() if len(group) >= MIN_PIECE]


def fit_rows(rows: Sequence[Row]) -> Fit:
    """The fit of one collective on one tier."""
    samples = sorted(Sample(row.size_bytes, row.seconds, row.spread) for row in rows)
    cuts = best_cuts(samples)
    pieces = pieces_of(samples, cuts)
    errors = list(zip(samples, stated_errors(samples, cuts), strict=True))
    return Fit(
        collective=rows[0].collective, tier=rows[0].tier, ranks=rows[0].ranks, nodes=rows[0].nodes,
        latency_seconds=pieces[0].latency_seconds, bytes_per_second=pieces[-1].bytes_per_second,
        relative_error=max((e for s, e in errors if s.size_bytes >= LARGE_BYTES), default=None),
        small_relative_error=max((e for s, e in errors if s.size_bytes < LARGE_BYTES), default=None),
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


def stated_errors(samples: Sequence[Sample], cuts: Sequence[int]) -> list[float]:
    """For each size how far a repeat may be off the fit: its residual were it left out of the fit, and the spread."""
    found = []
    for begin, end in zip(cuts, [*cuts[1:], len(samples)], strict=True):
        piece = list(samples[begin:end])
        for index, sample in enumerate(piece):
            others = piece[:index] + piece[index + 1 :] if len(piece) > MIN_PIECE else piece
            off = abs(residuals([sample], *line(others))[0])
            found.append(math.hypot(off, sample.spread))
    return found


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))

"""Fits recover what a line was made of, state an error that holds for held-out sizes and for a repeat."""

from __future__ import annotations

import random

import pytest

from paceline.bench.fit import LARGE_BYTES, Sample, best_cuts, fit_rows, line, pieces_of
from paceline.bench.rows import Row, make_row
from paceline.bench.sweep import Point, sizes
from paceline.units import KiB, MiB

SIZES = sizes(1 * KiB, 64 * MiB, 2)


def rows(times: dict[int, float], spread: float = 0.0) -> list[Row]:
    """Rows of an all-reduce on 2 ranks with these seconds."""
    made = []
    for size, seconds in times.items():
        rounds = [[seconds * factor] for factor in (1 - spread, 1 - spread / 2, 1 + spread / 2, 1 + spread)]
        made.append(make_row(Point("all_reduce", size, size // 4), "in_node", 2, 1, "fp32", rounds, 0))
    return made


def test_an_exact_line_is_recovered() -> None:
    fit = fit_rows(rows({size: 50e-6 + size / 1e9 for size in SIZES}))
    assert fit.latency_seconds == pytest.approx(50e-6, rel=1e-6)
    assert fit.bytes_per_second == pytest.approx(1e9, rel=1e-6)
    assert len(fit.pieces) == 1 and fit.relative_error == pytest.approx(0, abs=1e-6)
    assert fit.seconds(3 * MiB) == pytest.approx(50e-6 + 3 * MiB / 1e9, rel=1e-6)


def test_small_and_large_sizes_count_alike() -> None:
    # In absolute seconds the largest size outweighs the smallest by 5 orders, and latency would be anything.
    noisy = {size: (50e-6 + size / 1e9) * (1.05 if i % 2 else 0.95) for i, size in enumerate(SIZES)}
    alpha, per_byte = line([Sample(size, seconds) for size, seconds in noisy.items()])
    assert alpha == pytest.approx(50e-6, rel=0.05)
    assert 1 / per_byte == pytest.approx(1e9, rel=0.05)


def test_a_change_of_protocol_becomes_a_piece_and_its_size_is_found() -> None:
    knee = 256 * KiB
    times = {size: 20e-6 + size / 2e9 if size < knee else 150e-6 + size / 0.8e9 for size in SIZES}
    fit = fit_rows(rows(times))
    assert len(fit.pieces) == 2 and knee / 2 < fit.pieces[1].from_bytes < knee
    assert fit.latency_seconds == pytest.approx(20e-6, rel=1e-3)
    assert fit.bytes_per_second == pytest.approx(0.8e9, rel=1e-3)
    for size, seconds in times.items():
        assert fit.seconds(size) == pytest.approx(seconds, rel=1e-6)


def test_held_out_sizes_are_within_the_stated_error() -> None:
    for seed in range(30):
        draw = random.Random(seed)
        noise = draw.uniform(0.01, 0.05)

        def seconds(size: int, draw: random.Random = draw, noise: float = noise) -> float:
            return (40e-6 + size / 1.5e9) * draw.uniform(1 - noise, 1 + noise)

        fit = fit_rows(rows({size: seconds(size) for size in SIZES}, spread=noise))
        assert fit.relative_error is not None and fit.relative_error <= 0.15
        for size in (3 * s // 2 for s in SIZES if s >= LARGE_BYTES):
            assert abs(fit.seconds(size) / (40e-6 + size / 1.5e9) - 1) <= fit.relative_error, f"seed {seed}"


def test_a_noisy_machine_states_a_larger_error_than_a_quiet_one() -> None:
    times = {size: 50e-6 + size / 1e9 for size in SIZES}
    quiet, noisy = (fit_rows(rows(times, spread)).relative_error for spread in (0.01, 0.3))
    assert quiet is not None and noisy is not None
    assert quiet < 0.05 < 0.14 < noisy


def test_time_that_does_not_grow_is_latency() -> None:
    fit = fit_rows(rows(dict.fromkeys(SIZES[:6], 0.0001)))
    assert fit.latency_seconds == pytest.approx(100e-6, rel=0.01)
    assert fit.relative_error is None and fit.small_relative_error == pytest.approx(0, abs=0.01)


def test_cuts_are_no_more_than_needed() -> None:
    straight = [Sample(size, 50e-6 + size / 1e9) for size in SIZES]
    assert best_cuts(straight) == [0]
    assert best_cuts(straight[:2]) == [0]
    assert pieces_of(straight, [0])[0].from_bytes == 0

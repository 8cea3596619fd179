"""The order of samples, against Python sets and one-process runs."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from paceline.data.order import (
    eval_indices,
    eval_slice,
    mixture_at,
    positions_of_step,
    sample_at,
    samples_at,
)
from paceline.errors import JobError


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 16, 17, 22, 97, 1000, 4097, 65536, 65537])
def test_an_epoch_is_a_permutation_for_awkward_sizes(size: int) -> None:
    for epoch in range(3):
        samples = sample_at(5, epoch, np.arange(size), size)
        assert sorted(samples.tolist()) == list(range(size))


def test_scalar_and_array_agree() -> None:
    assert [sample_at(1, 2, p, 22) for p in range(22)] == sample_at(1, 2, np.arange(22), 22).tolist()


def test_each_epoch_and_seed_has_its_own_order() -> None:  # BL-20
    epochs = [sample_at(0, epoch, np.arange(22), 22).tolist() for epoch in range(3)]
    assert len({tuple(e) for e in epochs}) == 3
    assert sample_at(1, 0, np.arange(22), 22).tolist() != epochs[0]
    assert [sample_at(0, epoch, np.arange(22), 22).tolist() for epoch in range(3)] == epochs


@pytest.mark.parametrize("dp_degree", [1, 2])
def test_union_over_ranks_is_the_whole_set_in_each_epoch(dp_degree: int) -> None:  # BL-20
    read = []
    for step in range(33):  # 3 epochs of 22 samples in batches of 2
        for rank in range(dp_degree):
            for positions in positions_of_step(step, 2, rank, dp_degree, 1):
                read += samples_at(7, positions, 22).tolist()
    for epoch in range(3):
        assert sorted(read[epoch * 22 : epoch * 22 + 22]) == list(range(22))


def test_ranks_see_the_samples_of_one_process_in_its_order() -> None:
    whole = np.concatenate(positions_of_step(3, 24, 0, 1, 24))
    for degree, microbatch in [(2, 4), (3, 8), (4, 2), (8, 3)]:
        parts = [p for rank in range(degree) for p in positions_of_step(3, 24, rank, degree, microbatch)]
        assert np.array_equal(np.concatenate(parts), whole)


def test_a_batch_carries_over_the_end_of_an_epoch() -> None:  # BL-08
    steps = [positions_of_step(step, 4, 0, 1, 1) for step in range(5)]
    assert [len(microbatches) for microbatches in steps] == [4, 4, 4, 4, 4]  # 2 epochs of 10 micro-batches, K = 4
    read = samples_at(0, np.concatenate([p for s in steps for p in s]), 10).tolist()
    assert sorted(read[:10]) == sorted(read[10:]) == list(range(10))


def test_ten_to_the_twelve_samples_take_no_memory() -> None:
    size = 10**12
    tracemalloc.start()
    samples = sample_at(0, 3, np.arange(size - 1000, size), size)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1_000_000
    assert len(set(samples.tolist())) == 1000 and samples.min() >= 0 and samples.max() < size
    assert abs(samples.mean() / size - 0.5) < 0.05  # 1000 uniform draws: 5 standard deviations


def test_neighbours_are_not_neighbours_after_the_shuffle() -> None:
    samples = sample_at(0, 0, np.arange(10_000), 10_000)
    correlation = np.corrcoef(samples[:-1], samples[1:])[0, 1]
    assert abs(correlation) < 0.05  # 5 standard deviations of 10,000 independent draws
    chi = ((np.histogram(samples[:1000], bins=10, range=(0, 10_000))[0] - 100) ** 2 / 100).sum()
    assert chi < 40  # 9 degrees of freedom: p about 1e-5


def test_positions_outside_the_set_are_refused() -> None:
    with pytest.raises(JobError, match=r"0\.\.9"):
        sample_at(0, 0, 10, 10)


def test_batches_that_do_not_divide_are_refused_with_the_numbers() -> None:
    with pytest.raises(JobError, match="7 sequences do not divide over 2"):
        positions_of_step(0, 7, 0, 2, 1)
    with pytest.raises(JobError, match="micro-batch of 3 does not divide the 4"):
        positions_of_step(0, 8, 0, 2, 3)


def test_weights_set_each_sources_share_and_every_source_is_read_whole() -> None:
    sizes, weights = [30, 70, 100], [3.0, 1.0, 1.0]
    epochs = [mixture_at(0, np.arange(e * 200, e * 200 + 200), sizes, weights) for e in range(6)]
    for samples in epochs:
        counts = np.histogram(samples, bins=[0, 30, 100, 200])[0]
        assert counts.tolist() == [120, 40, 40]
    first = np.concatenate(epochs)
    own = first[first < 30]
    assert np.bincount(own[:720], minlength=30).tolist() == [24] * 30  # 6 epochs x 120 draws of 30 samples
    assert epochs[0].tolist() != epochs[1].tolist()
    assert np.array_equal(mixture_at(0, np.arange(150, 450), sizes, weights), first[150:450])


@pytest.mark.parametrize("limit", [None, 1, 7, 21, 400])
def test_eval_samples_are_spread_and_each_rank_has_its_own(limit: int | None) -> None:
    chosen = eval_indices(21, limit)
    assert chosen.size == min(21, limit or 21) and len(set(chosen.tolist())) == chosen.size
    for degree in (1, 2, 3, 4):
        parts = [chosen[eval_slice(chosen.size, r, degree)].tolist() for r in range(degree)]
        assert sorted(i for part in parts for i in part) == chosen.tolist()
        assert max(map(len, parts)) - min(map(len, parts)) <= 1

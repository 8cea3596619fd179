"""Which sample stands at which position: a pure function of (seed, epoch, position). Imports no torch.

No permutation is stored. A keyed Feistel network permutes 0..size-1 (Black and Rogaway, "Ciphers with Arbitrary Finite
Domains", 2002: the numbers that leave the range walk on until they are back), so a sample is found in the same time and
memory whether there are 20 or 10^12. Epochs follow one another without a gap: the stream of positions is endless,
sample `position % size` of epoch `position // size`, and a batch that meets an epoch's end carries over into the next
one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from paceline.errors import JobError

Int64 = npt.NDArray[np.int64]
_ROUNDS = 6


@overload
def sample_at(seed: int, epoch: int, position: int, size: int) -> int: ...
@overload
def sample_at(seed: int, epoch: int, position: npt.NDArray[np.integer], size: int) -> Int64: ...
def sample_at(seed: int, epoch: int, position: int | npt.NDArray[np.integer], size: int) -> int | Int64:
    """The sample at `position` (0..size-1) of `epoch`; over an array of positions, an array.

    Raises:
        JobError: a position outside 0..size-1, or a size below 1.
    """
    places = np.atleast_1d(np.asarray(position, dtype=np.int64))
    if size < 1 or (places.size and not 0 <= int(places.min()) <= int(places.max()) < size):
        raise JobError(f"positions must lie in 0..{size - 1}", values={"size": size})
    samples = permute(places, size, _key("order", seed, epoch))
    return int(samples[0]) if np.ndim(position) == 0 else samples


def samples_at(seed: int, positions: npt.ArrayLike, size: int) -> Int64:
    """Samples at positions of the endless stream of epochs over `size` samples."""
    stream = np.asarray(positions, dtype=np.int64)
    epochs = stream // size
    samples = np.empty_like(stream)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        samples[here] = sample_at(seed, int(epoch), stream[here] - epoch * size, size)
    return samples


def mixture_at(seed: int, positions: npt.ArrayLike, sizes: Sequence[int], weights: Sequence[float]) -> Int64:
    """Samples at positions of the stream over several weighted sources, numbered one source after the other.

    An epoch has as many samples as there are in all sources; source k gets its weight's share of them, to the nearest
    whole sample. Which source stands where is a permutation drawn anew for each epoch. Each source is walked through in
    an order of its own, whole before anything repeats, across the borders of epochs.
    """
    stream = np.asarray(positions, dtype=np.int64)
    total = sum(sizes)
    quotas = _quotas(weights, total)
    first_place = np.concatenate([[0], np.cumsum(quotas)])
    first_sample = np.concatenate([[0], np.cumsum(sizes)])
    epochs = stream // total
    place = samples_at(_number(_key("mixture", seed, 0)), stream, total)
    owner = np.searchsorted(first_place, place, side="right") - 1
    samples = np.empty_like(stream)
    for k in np.unique(owner):
        here = owner == k
        drawn_before = epochs[here] * quotas[k] + place[here] - first_place[k]
        samples[here] = first_sample[k] + samples_at(_number(_key("source", seed, int(k))), drawn_before, sizes[k])
    return samples


def positions_of_step(
    step: int, global_batch: int, dp_rank: int, dp_degree: int, microbatch: int
) -> list[npt.NDArray[np.int64]]:
    """Positions of the endless stream that a rank reads in an optimizer step, one array per micro-batch.

    Step s covers positions s*G .. (s+1)*G-1 for a global batch G, whatever the number of ranks; rank r takes the r-th
    of `dp_degree` equal slices.

    Raises:
        JobError: the global batch does not divide over the ranks, or a rank's share into micro-batches.
    """
    if global_batch % dp_degree:
        raise JobError(
            f"{global_batch} sequences do not divide over {dp_degree} data ranks",
            key="batch.global_batch",
            values={"global_batch": global_batch, "dp": dp_degree},
        )
    per_rank = global_batch // dp_degree
    if per_rank % microbatch:
        raise JobError(
            f"a micro-batch of {microbatch} does not divide the {per_rank} sequences per rank",
            key="batch.microbatch",
            values={"microbatch": microbatch, "per_rank": per_rank},
        )
    first = step * global_batch + dp_rank * per_rank
    return [np.arange(first + m, first + m + microbatch, dtype=np.int64) for m in range(0, per_rank, microbatch)]


def eval_indices(size: int, limit: int | None) -> Int64:
    """The samples of an eval set that are scored: all, or `limit` of them spread evenly over the set."""
    count = size if limit is None else min(size, limit)
    return np.arange(count, dtype=np.int64) * size // max(count, 1)


def eval_slice(count: int, dp_rank: int, dp_degree: int) -> slice:
    """The rank's own part of `count` eval samples: the parts are disjoint, cover all, and differ by one at most."""
    return slice(count * dp_rank // dp_degree, count * (dp_rank + 1) // dp_degree)


def permute(places: Int64, size: int, key: bytes) -> Int64:
    """A keyed permutation of 0..size-1 at `places`."""
    half = np.uint64(math.isqrt(size - 1) + 1)
    round_keys = np.frombuffer(hashlib.blake2b(key, digest_size=8 * _ROUNDS).digest(), dtype="<u8")
    values = _feistel(places.astype(np.uint64), half, round_keys)
    outside = np.flatnonzero(values >= size)
    while outside.size:
        values[outside] = _feistel(values[outside], half, round_keys)
        outside = outside[values[outside] >= size]
    return values.astype(np.int64)


def _feistel(
    values: npt.NDArray[np.uint64], half: np.uint64, round_keys: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    """A permutation of 0..half^2-1: each round adds a hash of one digit (base `half`) to the other."""
    left, right = values // half, values % half
    for round_key in round_keys:
        left, right = right, (left + _hash(right ^ round_key) % half) % half
    return left * half + right


def _hash(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Two multiply-and-fold rounds, so that each bit of the input reaches each bit of the output."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
        values = (values ^ (values >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return values ^ (values >> np.uint64(32))


def _key(purpose: str, *numbers: int) -> bytes:
    return ":".join([purpose, *map(str, numbers)]).encode()


def _number(key: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


def _quotas(weights: Sequence[float], total: int) -> Int64:
    """Whole shares of `total` in proportion to the weights; what rounding leaves goes to the largest remainders."""
    exact = np.asarray(weights, dtype=np.float64) / sum(weights) * total
    quotas = np.floor(exact).astype(np.int64)
    for k in np.argsort(quotas - exact, kind="stable")[: total - int(quotas.sum())]:
        quotas[k] += 1
    return quotas

"""The batches of an evaluation: every sample once, however many ranks there are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from paceline.data.collate import make_batch
from paceline.data.loader import Tensors, to_tensors
from paceline.data.order import eval_indices, eval_slice


class Filler(dict[str, Any]):
    """A batch that does not count: it keeps a rank's forward passes in step with those of the other ranks."""


def eval_batches(
    dataset: Any, *, microbatch: int, dp_rank: int, dp_degree: int, limit: int | None = None, in_step: bool = False
) -> Iterator[Tensors]:
    """This rank's batches of `dataset`: over all ranks every sample comes exactly once, none is padded or repeated.

    The last batch may be short, and a rank may get fewer batches than another, or none. With `in_step` all ranks get as
    many as the busiest one has (`eval_batch_count`), the missing ones as `Filler`.

    Args:
        dataset: map-style; see `Loader`.
        microbatch: samples per batch at most.
        dp_rank: this data rank.
        dp_degree: number of data ranks.
        limit: evaluate this many samples at most, spread evenly over the set.
        in_step: a forward pass is a collective, which all ranks must run equally often.
    """
    chosen = eval_indices(len(dataset), limit)
    mine = chosen[eval_slice(chosen.size, dp_rank, dp_degree)]
    for first in range(0, mine.size, microbatch):
        yield to_tensors(make_batch(dataset, mine[first : first + microbatch]))
    if in_step:
        wanted = eval_batch_count(len(dataset), microbatch=microbatch, dp_degree=dp_degree, limit=limit)
        for _ in range(wanted - math.ceil(mine.size / microbatch)):
            yield Filler(to_tensors(make_batch(dataset, chosen[:1])))


def eval_batch_count(size: int, *, microbatch: int, dp_degree: int, limit: int | None = None) -> int:
    """Batches of the rank that has most of them."""
    count = size if limit is None else min(size, limit)
    return math.ceil(math.ceil(count / dp_degree) / microbatch)

"""The batches of an evaluation: every sample once, however many ranks there are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from paceline.data.collate import make_batch
from paceline.data.loader import Tensors, to_tensors
from paceline.data.order import eval_indices, eval_slice


def eval_batches(
    dataset: Any, *, microbatch: int, dp_rank: int, dp_degree: int, limit: int | None = None
) -> Iterator[Tensors]:
    """This rank's batches of `dataset`: over all ranks every sample comes exactly once, none is padded or repeated.

    The last batch may be short, and a rank may get fewer batches than another, or none: `eval_batch_count` says how
    many the busiest rank has, for code that must run a forward on all ranks alike.

    Args:
        dataset: map-style; see `Loader`.
        microbatch: samples per batch at most.
        dp_rank: this data rank.
        dp_degree: number of data ranks.
        limit: evaluate this many samples at most, spread evenly over the set.
    """
    chosen = eval_indices(len(dataset), limit)
    mine = chosen[eval_slice(chosen.size, dp_rank, dp_degree)]
    for first in range(0, mine.size, microbatch):
        yield to_tensors(make_batch(dataset, mine[first : first + microbatch]))


def eval_batch_count(size: int, *, microbatch: int, dp_degree: int, limit: int | None = None) -> int:
    """Batches of the rank that has most of them."""
    count = size if limit is None else min(size, limit)
    return math.ceil(math.ceil(count / dp_degree) / microbatch)

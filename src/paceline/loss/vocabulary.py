"""Which rows of the vocabulary a rank has the logits of, and what a softmax over all of them needs from the other ranks.

A token's loss is log sum exp(z) - z[label] over the whole vocabulary. Ranks agree on the largest logit and on two sums of
one number per token; logits stay where they are. The gradient on each rank is softmax - one at the label, the one only
where the label's row is: so none of these sums is differentiated, and the loss is written as one function with its backward.

Shapes: N tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor


class VocabularyPart(NamedTuple):
    """Rows `first`, `first + 1`, ... of the vocabulary, as many as the logits have columns.

    `group` are the ranks that have the others, each the logits of the same tokens; None where there are no others.
    """

    first: int = 0
    group: dist.ProcessGroup | None = None

    def largest(self, largest_N: Tensor) -> Tensor:
        """The largest over all ranks, in place."""
        if self.group is not None:
            dist.all_reduce(largest_N, dist.ReduceOp.MAX, group=self.group)
        return largest_N

    def summed(self, values_N: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        if self.group is not None:
            dist.all_reduce(values_N, group=self.group)
        return values_N

    def find(self, labels_N: Tensor, rows: int, ignore: int) -> tuple[Tensor, Tensor, Tensor]:
        """For each label: its column here (0 where there is none), whether it has one, whether it counts at all."""
        counted_N = labels_N != ignore
        columns_N = labels_N - self.first
        here_N = counted_N & (columns_N >= 0) & (columns_N < rows)
        return columns_N.where(here_N, 0), here_N, counted_N


WHOLE_VOCABULARY = VocabularyPart()

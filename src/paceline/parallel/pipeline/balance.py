"""Which blocks a stage holds: cuts that make the dearest stage as cheap as it can be. Imports no torch.

Costs are operations per token, forward alone: the backward is twice the forward in every part, so that it changes no
comparison. The embedding is a lookup, which moves numbers and multiplies none; the output head multiplies with
`vocab_size` x `dim` weights, which in a small model is worth several blocks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import pairwise

from paceline.model.flop import attention_flop_per_token, block_matmul_parameter_count
from paceline.model.spec import ModelSpec

LOOKUP_FLOP_PER_NUMBER = 2
"""What a number that is looked up is worth: read and written once each, as a product reads and writes it."""

LOSS_FLOP_PER_LOGIT = 5
"""Softmax and loss per logit: maximum, difference, exponential, sum, quotient."""


def layer_costs(spec: ModelSpec, sequence_length: int) -> list[float]:
    """Forward operations per token of each block, the embedding's with the first and the head's with the last."""
    attention = attention_flop_per_token(spec, sequence_length, "causal") / spec.num_layers
    block = 2 * block_matmul_parameter_count(spec) + attention
    costs = [float(block)] * spec.num_layers
    costs[0] += LOOKUP_FLOP_PER_NUMBER * spec.dim * (2 if spec.positions == "learned" else 1)
    costs[-1] += spec.vocab_size * (2 * spec.dim + LOSS_FLOP_PER_LOGIT)
    return costs


def balanced_layers(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Blocks of each stage, at least one: the dearest stage is as cheap as possible, and so, then, is the sum of squares.

    Raises:
        ValueError: more stages than blocks.
    """
    if not 1 <= stages <= len(costs):
        raise ValueError(f"{len(costs)} blocks cannot be cut into {stages} stages")
    return _balanced(tuple(costs), stages)


@lru_cache(maxsize=256)
def _balanced(costs: tuple[float, ...], stages: int) -> tuple[int, ...]:
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)
    limit = _least_dearest(before, stages) * (1 + 1e-9)
    # Where a stage that begins at a block ends at the latest.
    farthest = [bisect_right(before, before[first] + limit) - 1 for first in range(len(costs))]

    @cache
    def best(first: int, parts: int) -> tuple[float, float, tuple[int, ...]] | None:
        """Dearest stage, sum of squares and lengths of the blocks from `first` on in `parts` stages; None: over the limit."""
        if parts == 1:
            whole = before[-1] - before[first]
            return (whole, whole**2, (len(costs) - first,)) if whole <= limit else None
        found = None
        for end in range(first + 1, min(farthest[first], len(costs) - parts + 1) + 1):
            after = best(end, parts - 1)
            if after is None:
                continue
            own = before[end] - before[first]
            candidate = (max(own, after[0]), own**2 + after[1], (end - first, *after[2]))
            if found is None or candidate[:2] < found[:2]:
                found = candidate
        return found

    found = best(0, stages)
    assert found is not None
    return found[2]


def _least_dearest(before: Sequence[float], stages: int) -> float:
    """The cost of the dearest stage where it is as cheap as can be, by halving the interval in which it lies."""
    steps = [b - a for a, b in pairwise(before)]
    low, high = max(max(steps), before[-1] / stages), before[-1]
    for _ in range(60):
        middle = (low + high) / 2
        first = used = 0
        while first < len(steps) and used <= stages:
            first = max(first + 1, bisect_right(before, before[first] + middle) - 1)
            used += 1
        low, high = (low, middle) if first >= len(steps) and used <= stages else (middle, high)
    return high


def stage_costs(costs: Sequence[float], layers: Sequence[int]) -> list[float]:
    """The cost of each stage."""
    found, first = [], 0
    for length in layers:
        found.append(sum(costs[first : first + length]))
        first += length
    return found

"""Which blocks a stage holds: cuts that make the dearest stage as cheap as it can be. Imports no torch.

Costs are operations per token, forward alone: the backward is twice the forward in every part, so that it changes no
comparison. The embedding is a lookup, which moves numbers and multiplies none; the output head multiplies with
`vocab_size` x `dim` weights, which in a small model is worth several blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

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
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)

    @cache
    def best(first: int, parts: int) -> tuple[float, float, tuple[int, ...]]:
        """Dearest stage, sum of squares and lengths of the blocks from `first` on in `parts` stages."""
        if parts == 1:
            whole = before[-1] - before[first]
            return whole, whole**2, (len(costs) - first,)
        found = None
        for length in range(1, len(costs) - first - parts + 2):
            own = before[first + length] - before[first]
            dearest, squares, rest = best(first + length, parts - 1)
            candidate = (max(own, dearest), own**2 + squares, (length, *rest))
            if found is None or candidate[:2] < found[:2]:
                found = candidate
        assert found is not None
        return found

    return best(0, stages)[2]


def stage_costs(costs: Sequence[float], layers: Sequence[int]) -> list[float]:
    """The cost of each stage."""
    found, first = [], 0
    for length in layers:
        found.append(sum(costs[first : first + length]))
        first += length
    return found

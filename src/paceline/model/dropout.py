# ruff: noqa: N815 -- tensors carry their shape as a suffix, in tuples too
"""Dropout whose masks are a function of (seed, step, sample, layer, site, position) and of nothing else.

A counter-based hash in integer tensor operations takes the place of a generator: the same sample gets the same mask in
whatever batch, on whatever rank and device it stands. Every number is a 32-bit word held in int64; the multipliers are
below 2^31, so that no product overflows.

Shapes: B sequences, L positions, D width, H heads, S keys, N layers x sites.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ATTENTION, ATTENTION_OUTPUT, MLP_OUTPUT = 0, 1, 2
SITES = 3
"""Places in a block where something is dropped: attention weights, and what each of the two branches adds."""

_WORD = 0xFFFFFFFF
_STEP = 0x9E3779B9


class DropoutKey(NamedTuple):
    """What a batch's masks follow from. `sample_ids_B` are the samples' numbers in the data order (int64)."""

    seed: int | Tensor
    step: int | Tensor
    sample_ids_B: Tensor


class AttentionDropout(NamedTuple):
    """Dropout on attention weights: share dropped, the block's key per sample, positions (1 or B, L) of the queries,
    head numbers, and positions (1 or B, S) of the keys where they are others than those of the queries."""

    rate: float
    key_B: Tensor
    positions_BL: Tensor
    heads_H: Tensor
    key_positions_BS: Tensor | None = None


def block_keys(key: DropoutKey, num_layers: int) -> Tensor:
    """A word for each layer, site and sample: (num_layers, SITES, B)."""
    ids_B = key.sample_ids_B.to(torch.int64)
    seed = torch.as_tensor(key.seed, dtype=torch.int64, device=ids_B.device)
    step = torch.as_tensor(key.step, dtype=torch.int64, device=ids_B.device)
    word_B = _absorb(_absorb(_absorb(torch.zeros_like(ids_B), seed), step), ids_B)
    places_N1 = torch.arange(num_layers * SITES, device=ids_B.device).unsqueeze(1)
    return _absorb(word_B, places_N1).view(num_layers, SITES, -1)


def dropout(x_BLD: Tensor, rate: float, key_B: Tensor, positions_BL: Tensor) -> Tensor:
    """x with a share `rate` of its numbers set to 0 and the others divided by 1 - rate."""
    row_BL = _absorb(key_B.unsqueeze(1), positions_BL)
    column_D = _mix(torch.arange(x_BLD.shape[-1], device=x_BLD.device) + _STEP & _WORD)
    return _drop(x_BLD, rate, row_BL.unsqueeze(-1) ^ column_D)


def drop_attention(weights_BHLS: Tensor, dropout: AttentionDropout) -> Tensor:
    """Attention weights with dropout."""
    head_BH = _absorb(dropout.key_B.unsqueeze(1), dropout.heads_H)
    query_BHL = _absorb(head_BH.unsqueeze(-1), dropout.positions_BL.unsqueeze(1))
    positions_BS = dropout.positions_BL if dropout.key_positions_BS is None else dropout.key_positions_BS
    key_BS = _mix(positions_BS + _STEP & _WORD)
    return _drop(weights_BHLS, dropout.rate, query_BHL.unsqueeze(-1) ^ key_BS[:, None, None, :])


def _drop(x: Tensor, rate: float, counter: Tensor) -> Tensor:
    kept = _mix(counter) >= round(rate * 2**32)
    return torch.where(kept, x * (1 / (1 - rate)), 0)


def _absorb(word: Tensor, value: Tensor) -> Tensor:
    """A new word from a word and both halves of a 64-bit value."""
    word = _mix((word ^ value & _WORD) + _STEP & _WORD)
    return _mix((word ^ value >> 32 & _WORD) + _STEP & _WORD)


def _mix(word: Tensor) -> Tensor:
    """A bijection of 32-bit words whose every output bit depends on every input bit.

    Two rounds of xor-shift and multiply; constants of the lowest known bias by Ettinger, C., hash-prospector
    (16, 0x21f0aaad, 15, 0x735a2d97, 15).
    """
    word = (word ^ word >> 16) * 0x21F0AAAD & _WORD
    word = (word ^ word >> 15) * 0x735A2D97 & _WORD
    return word ^ word >> 15

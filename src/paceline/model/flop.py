"""Floating-point operations and activation bytes of a decoder, by arithmetic. Imports no torch.

A multiplication with an addition counts as two operations. Every figure names its convention:

palm    6 x (parameters in matrix products) + 12 x layers x heads x head width x sequence length, for training: the
        output head counts, the input lookup does not, attention as if every token saw every other
        (Chowdhery et al. 2022, arXiv 2204.02311, appendix B)
causal  as palm, with half the attention: what a kernel that skips the masked half computes

Packed documents do less attention than either says.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from paceline.model.spec import ModelSpec, parameters

Convention = Literal["palm", "causal"]
Recompute = Literal["none", "selective", "full"]

_MATMUL_ROLES = ("query", "key_value", "attention_output", "mlp_input", "mlp_output")


def matmul_parameter_count(spec: ModelSpec) -> int:
    """Weights that every token is multiplied with: the blocks' linear layers and the output head, tied or not."""
    return block_matmul_parameter_count(spec) * spec.num_layers + spec.vocab_size * spec.dim


def block_matmul_parameter_count(spec: ModelSpec) -> int:
    """Weights of one block's linear layers."""
    return sum(math.prod(p.shape) for p in parameters(spec) if p.layer == 0 and p.role in _MATMUL_ROLES)


def attention_flop_per_token(spec: ModelSpec, sequence_length: int, convention: Convention = "palm") -> float:
    """Forward operations of the two attention products of all layers, per token."""
    full = 4 * spec.num_layers * spec.num_heads * spec.head_dim * sequence_length
    return full if convention == "palm" else full / 2


def forward_flop_per_token(spec: ModelSpec, sequence_length: int, convention: Convention = "palm") -> float:
    """Forward operations per token."""
    return 2 * matmul_parameter_count(spec) + attention_flop_per_token(spec, sequence_length, convention)


def training_flop_per_token(spec: ModelSpec, sequence_length: int, convention: Convention = "palm") -> float:
    """Forward and backward operations per token, the backward twice the forward; nothing recomputed (model FLOP)."""
    return 3 * forward_flop_per_token(spec, sequence_length, convention)


def hardware_flop_per_token(
    spec: ModelSpec, sequence_length: int, recompute: Recompute = "none", convention: Convention = "palm"
) -> float:
    """What the device computes per token: training, and what `recompute` does twice (the attention products of every
    block with `selective`, every block with `full`; the output head never)."""
    attention = attention_flop_per_token(spec, sequence_length, convention)
    blocks = 2 * block_matmul_parameter_count(spec) * spec.num_layers + attention
    again = {"none": 0, "selective": attention, "full": blocks}[recompute]
    return training_flop_per_token(spec, sequence_length, convention) + again


class ActivationBytes(NamedTuple):
    """What a forward keeps for its backward, in bytes, parameters left out.

    per_layer: of one block, its input counted, its 16-bit weight copies not.
    layers: of all blocks.
    embedding: token numbers, and what stands between the lookup and the first block.
    head: the last norm and the output head's input.
    logits_and_loss: logits and what the loss keeps, its gradient not yet counted.
    weight_copies: 16-bit copies of fp32 weights that autocast makes once a forward.
    """

    per_layer: int
    layers: int
    embedding: int
    head: int
    logits_and_loss: int
    weight_copies: int

    @property
    def total(self) -> int:
        """All parts together."""
        return self.layers + self.embedding + self.head + self.logits_and_loss + self.weight_copies

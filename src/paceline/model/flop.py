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
from functools import lru_cache
from typing import Literal, NamedTuple

import msgspec

from paceline.model.spec import ModelSpec, parameters

Convention = Literal["palm", "causal"]
Recompute = Literal["none", "selective", "full"]

_MATMUL_ROLES = ("query", "key_value", "attention_output", "mlp_input", "mlp_output")


def matmul_parameter_count(spec: ModelSpec) -> int:
    """Weights that every token is multiplied with: the blocks' linear layers and the output head, tied or not."""
    return block_matmul_parameter_count(spec) * spec.num_layers + spec.vocab_size * spec.dim


@lru_cache(maxsize=256)
def block_matmul_parameter_count(spec: ModelSpec) -> int:
    """Weights of one block's linear layers."""
    one = msgspec.structs.replace(spec, num_layers=1)
    return sum(math.prod(p.shape) for p in parameters(one) if p.layer == 0 and p.role in _MATMUL_ROLES)


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
    """What the device computes per token: training, and the products that `recompute` does twice.

    `full` does those of every block again, the output head never. `selective` keeps them all, but for the scores of
    attention with dropout, which is written out.
    """
    attention = attention_flop_per_token(spec, sequence_length, convention)
    blocks = 2 * block_matmul_parameter_count(spec) * spec.num_layers + attention
    scores = attention / 2 if spec.attention_dropout else 0
    again = {"none": 0, "selective": scores, "full": blocks}[recompute]
    return training_flop_per_token(spec, sequence_length, convention) + again


class ActivationBytes(NamedTuple):
    """What a forward keeps for its backward, in bytes, parameters left out.

    block_input: the residual stream before one block, all that full recomputation keeps of it.
    per_layer: of one block, its input counted, under the recomputation asked for.
    layers: of all blocks.
    tables: token numbers, rotary tables, the mask of packed documents where a kernel needs one.
    head: the last norm and the output head's input.
    logits_and_loss: what the loss keeps. Its backward holds the logits' gradient beside it for a moment.
    weight_copies: 16-bit copies of wider weights, made once a forward by autocast.
    recomputed_block: with recomputation, what the block whose backward runs holds beyond `per_layer`.
    forward_copies: with recomputation, copies of weights that live until the end of the forward and no longer.
    """

    block_input: int
    per_layer: int
    layers: int
    tables: int
    head: int
    logits_and_loss: int
    weight_copies: int
    recomputed_block: int = 0
    forward_copies: int = 0

    @property
    def total(self) -> int:
        """All parts together."""
        return self.layers + self.tables + self.head + self.logits_and_loss + self.weight_copies


def activation_bytes(
    spec: ModelSpec,
    microbatch: int,
    sequence_length: int,
    dtype_bytes: int,
    *,
    residual_bytes: int = 4,
    loss_chunk_bytes: int = 2**20,
    masked_documents: bool = False,
    recompute: Recompute = "none",
    stream_ranks: int = 1,
    sequence_ranks: int = 1,
    blocks_in_dtype: bool = False,
) -> ActivationBytes:
    """Bytes that the eager decoder and its loss keep between a forward and its backward in training.

    Args:
        dtype_bytes: of the matrix products: 2 under bf16 autocast, 4 in fp32, 8 in float64.
        residual_bytes: of the weights and the residual stream; at least `dtype_bytes`. 2 where weights are bf16.
        loss_chunk_bytes: the loss keeps its logits as they are where their float32 form is larger, and a float32
            log-softmax where it is not (`loss.cross_entropy`).
        masked_documents: packed documents on a device whose kernel takes a mask.
        recompute: what blocks compute anew in their backward.
        stream_ranks: ranks that share the positions of the residual stream between products.
        sequence_ranks: ranks that share each sequence; what is returned is one rank's.
        blocks_in_dtype: the blocks' weights have the products' type already, as those gathered in 16 bit: no copies.
    """
    whole_length, sequence_length = sequence_length, sequence_length // sequence_ranks
    tokens = microbatch * sequence_length
    stream_tokens = tokens // stream_ranks
    head_norm_bytes = dtype_bytes if blocks_in_dtype else residual_bytes
    block_input = stream_tokens * spec.dim * residual_bytes
    per_layer = tokens * _product_input_bytes_per_token(spec, dtype_bytes, residual_bytes, head_norm_bytes)
    per_layer += stream_tokens * _stream_bytes_per_token(spec, residual_bytes)
    if spec.attention_dropout:
        per_layer += _written_out_attention_bytes(spec, microbatch, sequence_length, whole_length, dtype_bytes)
    table_bytes = max(residual_bytes, 4)
    tables = 8 * tokens + (8 * sequence_length if spec.positions == "learned" else 0)
    tables += 2 * table_bytes * sequence_length * spec.head_dim if spec.positions == "rope" else 0
    tables += dtype_bytes * tokens * whole_length if masked_documents else 0
    chunked = tokens * spec.vocab_size * 4 > loss_chunk_bytes
    logit_bytes = dtype_bytes if chunked else max(dtype_bytes, 4)
    copied = dtype_bytes < residual_bytes
    head_copy = dtype_bytes * spec.vocab_size * spec.dim if copied else 0
    block_copies = dtype_bytes * block_matmul_parameter_count(spec) if copied and not blocks_in_dtype else 0
    kept, anew = per_layer, 0
    if recompute != "none":
        outputs, shared = _product_bytes_per_token(spec, dtype_bytes) if recompute == "selective" else (0, 0)
        kept = block_input + tokens * outputs
        anew = per_layer - block_input - tokens * shared + block_copies
    return ActivationBytes(
        block_input=block_input,
        per_layer=kept,
        layers=kept * spec.num_layers,
        tables=tables,
        head=stream_tokens * _norm_bytes_per_token(spec, residual_bytes) + tokens * spec.dim * dtype_bytes,
        logits_and_loss=tokens * (spec.vocab_size * logit_bytes + 8),
        weight_copies=head_copy + (block_copies * spec.num_layers if recompute == "none" else 0),
        recomputed_block=anew,
        forward_copies=block_copies * spec.num_layers if recompute != "none" else 0,
    )


def _stream_bytes_per_token(spec: ModelSpec, residual_bytes: int) -> int:
    """Both norms, and a byte for each number of both branches: kept or not."""
    return 2 * _norm_bytes_per_token(spec, residual_bytes) + (2 * spec.dim if spec.dropout else 0)


def _product_input_bytes_per_token(spec: ModelSpec, dtype_bytes: int, residual_bytes: int, head_norm_bytes: int) -> int:
    query_dim, kv_dim = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    norms = 0
    if spec.qk_norm:
        norms += head_norm_bytes * (query_dim + kv_dim) + residual_bytes * (spec.num_heads + spec.num_kv_heads)
    # Input of the three layers; queries, keys, values; attention's output.
    attention = dtype_bytes * (spec.dim + 2 * query_dim + 2 * kv_dim)
    # A log-sum-exp a head; without the fused kernel, see `_written_out_attention_bytes`.
    attention += 0 if spec.attention_dropout else max(dtype_bytes, 4) * spec.num_heads
    # Input; gate, its silu, up and their product; or up and its gelu.
    mlp = dtype_bytes * (spec.dim + (4 if spec.mlp == "swiglu" else 2) * spec.ffn_dim)
    return norms + attention + mlp


def _product_bytes_per_token(spec: ModelSpec, dtype_bytes: int) -> tuple[int, int]:
    """What selective recomputation keeps beside the block's input, and how much of it the backward reads as it is.

    Kept are the outputs of all products and of attention. Queries and keys are read after their rotation, and what the
    two branches add is not read at all.
    """
    query_dim, kv_dim = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shared = dtype_bytes * (kv_dim + query_dim + (2 if spec.mlp == "swiglu" else 1) * spec.ffn_dim)
    shared += 0 if spec.attention_dropout else max(dtype_bytes, 4) * spec.num_heads
    return shared + dtype_bytes * (query_dim + kv_dim + 2 * spec.dim), shared


def _norm_bytes_per_token(spec: ModelSpec, residual_bytes: int) -> int:
    """The norm's input and its statistics: one number for RMSNorm, two for layer norm."""
    return residual_bytes * spec.dim + max(residual_bytes, 4) * (2 if spec.norm == "layernorm" else 1)


def _written_out_attention_bytes(spec: ModelSpec, microbatch: int, queries: int, keys: int, dtype_bytes: int) -> int:
    """Attention with dropout is not fused: softmax in fp32, a byte of mask, and the weights after both, a number for each
    query and key; the causal mask; and keys and values repeated to as many heads as the queries have."""
    weights = microbatch * spec.num_heads * queries * keys * (max(dtype_bytes, 4) + 1 + dtype_bytes)
    repeated = 2 * (spec.num_heads - spec.num_kv_heads) * spec.head_dim * dtype_bytes
    return weights + queries * keys + microbatch * keys * repeated

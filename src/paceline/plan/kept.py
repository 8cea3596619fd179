"""Bytes that one block keeps between its forward and its backward on one rank, whoever's engine it is. Imports no torch.

For 16-bit numbers, GELU, as many key heads as query heads and dropout it is the table of Korthikanti et al. 2022 (arXiv
2205.05198, table 2), s tokens x b sequences x width h, a heads, t ranks:

    none             s b h (34 + 5 a s / h)            tensor and sequence parallel   that / t
    tensor parallel  s b h (10 + 24 / t + 5 a s / (h t))                   recomputed   2 s b h

of which 5 a s / h is what a fused attention does not write. Key heads fewer than query heads, SwiGLU and other widths
follow from the same sum over tensors. A test holds the closed forms.
"""

from __future__ import annotations

from typing import NamedTuple

from paceline.plan.memory_habits import Habits
from paceline.plan.setting import Setting

LOG_SUM_EXP_BYTES = 4
MASK_BYTES = 1


class BlockBytes(NamedTuple):
    """Of one block and one micro-batch on a rank.

    kept: until its backward, under the recomputation asked for. stream: of the residual stream before or after a block.
    working: what the block whose backward runs holds beyond `kept`: what it computes anew, and gradients on their way.
    """

    kept: float
    stream: float
    working: float


class Split(NamedTuple):
    """Tokens of one micro-batch on a rank, and the ways in which numbers are split beyond them."""

    tokens: int
    tp: int
    stream: int
    number: float
    input: float


def split_of(setting: Setting, habits: Habits) -> Split:
    """How a block's numbers are split, and their bytes: of a number, and of one kept as the input of a product."""
    tp = setting.layout.tp
    number = 4.0 if setting.precision == "fp32" else 8.0 if setting.precision == "fp64" else 2.0
    return Split(
        tokens=setting.microbatch * setting.sequence_length // setting.layout.cp,
        tp=tp,
        stream=tp if setting.sequence_parallel else 1,
        number=number,
        input=max(number, habits.input_bytes) if number > 2 else habits.input_bytes,
    )


def block_bytes(setting: Setting, habits: Habits) -> BlockBytes:
    """What one block keeps; see `BlockBytes`."""
    split = split_of(setting, habits)
    spec = setting.spec
    scores = _scores(setting, split)
    whole = _linear(setting, habits, split) + scores
    stream = split.number * spec.dim / split.stream
    kept = _under_recompute(setting, habits, split, whole, scores)
    gate = 2 if spec.mlp == "swiglu" else 1
    gradients = split.number * (2 * spec.dim / split.stream + (gate + 1) * spec.ffn_dim / split.tp)
    if setting.sequence_parallel:
        gradients += split.number * spec.dim
    gradients += _exchanged(setting, split)
    tokens = split.tokens
    return BlockBytes(tokens * kept, tokens * stream, tokens * (whole - kept + gradients))


def _exchanged(setting: Setting, split: Split) -> float:
    """Per token, keys and values of other context ranks: all of them, or those of the next rank and its gradients'."""
    ranks = setting.layout.cp
    if ranks == 1:
        return 0.0
    held = ranks if setting.context_method == "gather" else 2
    return 2 * split.number * _kv(setting, split) * held


def _under_recompute(setting: Setting, habits: Habits, split: Split, whole: float, scores: float) -> float:
    """Per token, what is kept of `whole`. Full recomputation may leave some blocks out; selective is of several kinds."""
    spec = setting.spec
    if setting.recompute == "full":
        stream = split.number * spec.dim / split.stream
        return setting.recomputed_layers * stream + (1 - setting.recomputed_layers) * whole
    if setting.recompute == "none":
        return whole
    if setting.recomputed == "every other product":
        return _every_second_product(setting, split)
    if setting.recomputed == "mlp":
        # The feed-forward's inner numbers; its input, the norm's output, stays.
        return whole - scores - _feed_forward(setting, habits, split)
    return whole - scores


def _linear(setting: Setting, habits: Habits, split: Split) -> float:
    """Per token, all but the scores: both norms' inputs; the inputs of the products; heads; the feed-forward; masks."""
    spec, compiled = setting.spec, setting.compile
    query, kv = spec.num_heads * spec.head_dim / split.tp, _kv(setting, split)
    norms = 2 * split.number * spec.dim / split.stream
    # What a norm gives is what the next products read. Compiled, it is computed anew from the norm's input, but not what
    # was gathered from other ranks.
    gathers = habits.gathered_inputs and split.stream > 1 and not setting.tensor_overlap
    inputs = 0.0 if compiled and not gathers else 2 * split.input * spec.dim / (1 if gathers else split.stream)
    heads = split.number * (query + 2 * kv) + split.input * query
    masks = 2 * MASK_BYTES * spec.dim / split.stream if setting.spec.dropout else 0.0
    return norms + inputs + heads + _feed_forward(setting, habits, split) + masks


def _feed_forward(setting: Setting, habits: Habits, split: Split) -> float:
    numbers = habits.swiglu[1 if setting.compile else 0] if setting.spec.mlp == "swiglu" else 2.0
    return (split.number * (numbers - 1) + split.input) * setting.spec.ffn_dim / split.tp


def _kv(setting: Setting, split: Split) -> float:
    """Numbers of a token's keys on a rank; ranks beyond the key heads hold copies."""
    return max(1.0, setting.spec.num_kv_heads / split.tp) * setting.spec.head_dim


def _scores(setting: Setting, split: Split) -> float:
    """Per token: the softmax over all keys, its mask and what is left after it; or the fused kernel's log-sum-exp."""
    heads = setting.spec.num_heads / split.tp
    if setting.fused_attention:
        return LOG_SUM_EXP_BYTES * heads
    drops = setting.spec.attention_dropout or setting.spec.dropout
    dropped = MASK_BYTES + split.number if drops else 0.0
    return heads * setting.sequence_length * (split.number + dropped)


def _every_second_product(setting: Setting, split: Split) -> float:
    """Per token, selective recomputation of torchtitan: the block's input, the outputs of every second product (queries,
    values, the gate, the block's last) and of attention, and what a reduce-scatter gave.

    Eager code keeps what it was told to keep; a compiled block leaves out what its backward does not read, which is the last
    product's output and what was reduced of it.
    """
    spec = setting.spec
    query, kv, stream = spec.num_heads * spec.head_dim / split.tp, _kv(setting, split), spec.dim / split.stream
    numbers = stream + 2 * query + kv + spec.ffn_dim / split.tp
    reduced = stream if split.tp > 1 else 0.0
    numbers += reduced if setting.compile else 2 * reduced + spec.dim
    return split.number * numbers + LOG_SUM_EXP_BYTES * spec.num_heads / split.tp

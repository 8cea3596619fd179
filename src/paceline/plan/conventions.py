"""Operations that a published TFLOP/s figure counts, by the convention of its source. Imports no torch.

Conventions differ by up to 1.33 (hardware or model operations), 1.17 (causal or full attention) and 1.12 (whether shared
key and value heads are seen); a figure becomes seconds through its own. Symbols: L layers, h width, s sequence length,
V vocabulary, f width of the MLP.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from paceline.model.flop import attention_flop_per_token, matmul_parameter_count
from paceline.model.spec import ModelSpec, non_embedding_parameter_count, parameter_count


def _megatron(spec: ModelSpec, seq: int, passes: int, head: float) -> float:
    h, layers = spec.dim, spec.num_layers
    return 24 * passes * layers * h * h * (1 + seq / (6 * h) + spec.vocab_size / (head * layers * h))


def _dgxc(spec: ModelSpec, seq: int) -> float:
    """MHA projections for GPT and Nemotron even where key and value heads are shared, as the source prints them."""
    h, f, layers = spec.dim, spec.ffn_dim, spec.num_layers
    head = 6 * spec.vocab_size * h
    if spec.mlp == "swiglu":
        return 12 * layers * h * h * (1 + spec.num_kv_heads / spec.num_heads + seq / h) + 18 * layers * f * h + head
    return 24 * layers * h * h + 12 * layers * h * seq + 12 * layers * f * h + head


def _model(spec: ModelSpec, seq: int, share: float) -> float:
    return 6 * matmul_parameter_count(spec) + 3 * share * attention_flop_per_token(spec, seq)


_PER_TOKEN: dict[str, Callable[[ModelSpec, int, str], float]] = {
    "megatron2021_hw": lambda spec, seq, _: _megatron(spec, seq, 4, 16),
    "megatron_simple_4x": lambda spec, _, __: 8 * parameter_count(spec),
    "megatron_model_full": lambda spec, seq, _: _megatron(spec, seq, 3, 12),
    "palm_full": lambda spec, seq, _: 6 * parameter_count(spec) + 3 * attention_flop_per_token(spec, seq),
    "palm_full_nonembed": lambda spec, seq, _: (
        6 * (parameter_count(spec) - spec.vocab_size * spec.dim) + 3 * attention_flop_per_token(spec, seq)
    ),
    "mosaic_full": lambda spec, seq, recompute: (
        (8 if recompute == "full" else 6) * (non_embedding_parameter_count(spec) + spec.vocab_size * spec.dim)
        + (4 if recompute == "full" else 3) * attention_flop_per_token(spec, seq)
    ),
    "dgxc_full": lambda spec, seq, _: _dgxc(spec, seq),
    "dgxc_full_fp8peak": lambda spec, seq, _: _dgxc(spec, seq),
    "nemo_model_full": lambda spec, seq, _: _model(spec, seq, 1.0),
    "nemo_model_causal": lambda spec, seq, _: _model(spec, seq, 0.5),
    "nanogpt_mfu + torch FlopCounter HFU": lambda spec, seq, _: _model(spec, seq, 1.0),
}

KNOWN = tuple(_PER_TOKEN)
"""Conventions that are converted; a figure of another one gives no seconds."""


@lru_cache(maxsize=1024)
def published_flop_per_token(convention: str, spec: ModelSpec, sequence_length: int, recompute: str) -> float | None:
    """Operations per token of a training step as a convention counts them, or None where it is not known."""
    count = _PER_TOKEN.get(convention)
    return count(spec, sequence_length, recompute) if count else None

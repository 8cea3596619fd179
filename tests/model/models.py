"""Small decoders of each family, for the tests of the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.model.config import ModelSection
from paceline.model.init import initialise
from paceline.model.spec import ModelSpec, resolve
from paceline.model.transformer import Decoder

SIZE: dict[str, Any] = {
    "num_layers": 2, "dim": 32, "num_heads": 4, "head_dim": 8, "ffn_dim": 48, "vocab_size": 64, "max_sequence_length": 64,
}  # fmt: skip

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"preset": "small", "num_kv_heads": 2},
    "tiny": {"preset": "tiny"},
    "qwen": {"preset": "qwen3-0.6b", "num_kv_heads": 2, "head_dim": 16},
    "qwen2": {"preset": "small", "num_kv_heads": 1, "qkv_bias": True},
    "gpt2": {"preset": "gpt2"},
}
"""Keys of [model] by the trait they exercise."""


def small_spec(family: str, **keys: Any) -> ModelSpec:
    """A two-layer spec of a family."""
    return resolve(ModelSection(**{**SIZE, **FAMILIES[family], **keys}))


def small_decoder(family: str, dtype: torch.dtype = torch.float64, seed: int = 0, **keys: Any) -> Decoder:
    """An initialised decoder with weights large enough that every part shows in the output."""
    spec = small_spec(family, **keys)
    model = Decoder(spec, device="meta").to(dtype)
    initialise(model, spec, seed, "cpu")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=dtype) * 0.15)
    return model


def some_tokens(batch: int, length: int, vocabulary: int = 64, seed: int = 3) -> Tensor:
    """Random token numbers (batch, length)."""
    return torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))

"""FLOP against published figures and torch's counter, activation bytes against what autograd saves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from paceline.loss.cross_entropy import token_cross_entropy
from paceline.model.attention import Documents, plain
from paceline.model.config import ModelSection
from paceline.model.dropout import DropoutKey
from paceline.model.flop import (
    activation_bytes,
    attention_flop_per_token,
    forward_flop_per_token,
    hardware_flop_per_token,
    matmul_parameter_count,
    training_flop_per_token,
)
from paceline.model.init import initialise
from paceline.model.spec import ModelSpec, resolve
from paceline.model.transformer import Decoder
from tests.model.models import FAMILIES, small_spec, some_tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_flop_are_those_of_the_matrix_products(family: str) -> None:
    """torch counts the products of a decoder whose attention is written out, masked half included."""
    spec = small_spec(family)
    model = Decoder(spec, attention=plain, device="meta")
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(2, 24, dtype=torch.int64, device="meta"))
    assert counter.get_total_flops() == forward_flop_per_token(spec, 24) * 48


def test_training_flop_of_published_models() -> None:
    """Llama 3 405B: 3.8e25 FLOP for 15.6e12 tokens (arXiv 2407.21783, section 3.2), 6 N D, attention left out."""
    spec = resolve(ModelSection(preset="llama3-405b"))
    without_attention = 6 * matmul_parameter_count(spec) * 15.6e12
    assert without_attention == pytest.approx(3.8e25, rel=0.01)
    # 12 x layers x heads x head width x sequence length.
    attention = training_flop_per_token(spec, 8192) - 6 * matmul_parameter_count(spec)
    assert attention == 12 * 126 * 128 * 128 * 8192


def test_conventions_and_recomputation() -> None:
    spec = small_spec("llama")
    palm, causal = training_flop_per_token(spec, 64), training_flop_per_token(spec, 64, "causal")
    assert palm - causal == 3 * attention_flop_per_token(spec, 64) / 2
    assert hardware_flop_per_token(spec, 64) == palm
    assert hardware_flop_per_token(spec, 64, "selective") == palm
    dropped = small_spec("llama", attention_dropout=0.1)
    assert hardware_flop_per_token(dropped, 64, "selective") == palm + attention_flop_per_token(spec, 64) / 2
    head = 2 * spec.vocab_size * spec.dim
    assert hardware_flop_per_token(spec, 64, "full") == palm + forward_flop_per_token(spec, 64) - head
    tied = small_spec("llama", tie_embeddings=True)
    assert training_flop_per_token(tied, 64) == palm


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("llama", {}),
        ("llama", {"vocab_size": 4096, "num_kv_heads": 4}),
        ("qwen", {}),
        ("qwen2", {}),
        ("gpt2", {}),
        ("tiny", {"dropout": 0.1}),
        ("llama", {"dropout": 0.1, "attention_dropout": 0.1}),
    ],
)
def test_activation_bytes_are_what_autograd_saves(family: str, keys: dict[str, Any], bf16: bool) -> None:
    """Within 1 %: the rest are a batch's stray scalars and the hash tables of dropout."""
    spec = small_spec(family, **{"max_sequence_length": 128, **keys})
    predicted = activation_bytes(spec, 3, 96, 2 if bf16 else 4)
    assert saved_bytes(spec, 3, 96, bf16) == pytest.approx(predicted.total, rel=0.01)


@pytest.mark.parametrize("bf16", [False, True])
def test_activation_bytes_with_documents(bf16: bool) -> None:
    spec = small_spec("llama", max_sequence_length=128)
    documents = Documents(torch.tensor([0, 50, 96, 192, 288], dtype=torch.int32), 96)
    predicted = activation_bytes(spec, 3, 96, 2 if bf16 else 4, masked_documents=True)
    assert saved_bytes(spec, 3, 96, bf16, documents) == pytest.approx(predicted.total, rel=0.01)


def test_activation_bytes_of_the_10m_decoder() -> None:
    spec = resolve(ModelSection(preset="small"))
    for bf16 in (False, True):
        predicted = activation_bytes(spec, 1, 96, 2 if bf16 else 4)
        assert saved_bytes(spec, 1, 96, bf16) == pytest.approx(predicted.total, rel=0.001)
        assert predicted.layers == 8 * predicted.per_layer


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_that_are_in_bf16_are_not_copied(family: str) -> None:
    """What sharding gathers in bf16 is counted there, and autocast makes no second copy of it."""
    spec = small_spec(family, max_sequence_length=128)
    predicted = activation_bytes(spec, 3, 96, 2, blocks_in_dtype=True)
    assert predicted.weight_copies == 2 * spec.vocab_size * spec.dim
    assert saved_bytes(spec, 3, 96, True, bf16_blocks=True) == pytest.approx(predicted.total, rel=0.01)


def saved_bytes(
    spec: ModelSpec,
    microbatch: int,
    length: int,
    bf16: bool,
    documents: Documents | None = None,
    bf16_blocks: bool = False,
) -> int:
    """Bytes of the distinct storages that a forward and its loss save for backward, parameters left out."""
    model = Decoder(spec)
    initialise(model, spec, 0, "cpu")
    if bf16_blocks:
        model.blocks.bfloat16()
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    inputs = some_tokens(microbatch, length, spec.vocab_size)
    labels = some_tokens(microbatch, length, spec.vocab_size, seed=4)
    key = DropoutKey(1, 1, torch.arange(microbatch))
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=bf16),
    ):
        token_cross_entropy(model(inputs, documents, None, key), labels)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    return sum(size for pointer, size in storages.items() if pointer not in parameters)

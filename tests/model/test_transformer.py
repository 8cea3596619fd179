"""The decoder against explicit arithmetic, its families, its settings, and its compiled form."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from paceline.errors import JobError
from paceline.model.attention import Documents
from paceline.model.dropout import DropoutKey
from paceline.model.init import initialise
from paceline.model.transformer import Decoder
from tests.model.models import FAMILIES, small_decoder, small_spec, some_tokens
from tests.model.reference import decode


def packed(*borders: int, end: int) -> Documents:
    longest = max(b - a for a, b in zip((0, *borders), (*borders, end), strict=True))
    return Documents(torch.tensor([0, *borders, end], dtype=torch.int32), longest)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_those_of_explicit_arithmetic(family: str) -> None:
    """float64; both sides do the same sums in another order, so 1e-11 of the largest number.

    Gradients are held to the largest of all: that of a key's bias is 0 but for rounding.
    """
    model, tokens = small_decoder(family), some_tokens(2, 9)
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    logits, expected = model(tokens), decode(model.spec, weights, tokens)
    assert relative_difference(logits, expected) < 1e-11
    direction = torch.randn(logits.shape, dtype=logits.dtype, generator=torch.Generator().manual_seed(5))
    logits.backward(direction)
    expected.backward(direction)
    grads = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
    largest = max(float(grad.abs().max()) for grad in grads.values())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert float((parameter.grad - grads[name]).abs().max()) < 1e-11 * largest, name


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_are_those_of_explicit_arithmetic(family: str) -> None:
    model, tokens = small_decoder(family), some_tokens(2, 9)
    expected = decode(model.spec, dict(model.named_parameters()), tokens, borders=[4, 9, 12, 17])
    assert relative_difference(model(tokens, packed(4, 9, 12, 17, end=18)), expected) < 1e-11


@pytest.mark.parametrize("attention_dropout", [0.0, 0.2])
def test_packed_documents_never_see_each_other(attention_dropout: float) -> None:
    """Bit for bit: whatever stands in document 1, documents 2 and 3 do not change; nor their gradients reach it."""
    model, tokens = small_decoder("llama", attention_dropout=attention_dropout), some_tokens(2, 12)
    key = DropoutKey(1, 2, torch.tensor([3, 4]))
    documents = packed(5, 12, 20, end=24)
    other = tokens.clone()
    other[0, :5] = (tokens[0, :5] + 7) % 64
    before, after = model(tokens, documents, None, key), model(other, documents, None, key)
    assert not torch.equal(before[0, :5], after[0, :5])
    assert torch.equal(before[0, 5:], after[0, 5:]) and torch.equal(before[1], after[1])


def test_documents_as_long_as_the_sequence_change_nothing() -> None:
    model, tokens = small_decoder("llama"), some_tokens(2, 12)
    assert relative_difference(model(tokens, packed(12, end=24)), model(tokens)) < 1e-12
    padded = Documents(torch.tensor([0, 12, 24, 24, 24], dtype=torch.int32), 12)
    assert torch.equal(model(tokens, padded), model(tokens, packed(12, end=24)))


def test_no_token_sees_a_later_one() -> None:
    model, tokens = small_decoder("qwen"), some_tokens(1, 12)
    other = tokens.clone()
    other[0, 7] = (tokens[0, 7] + 1) % 64
    assert torch.equal(model(tokens)[0, :7], model(other)[0, :7])


def test_rotary_positions_are_relative_and_learned_ones_are_not() -> None:
    tokens, shifted = some_tokens(1, 12), torch.arange(20, 32).unsqueeze(0)
    rotary, learned = small_decoder("llama"), small_decoder("gpt2")
    assert relative_difference(rotary(tokens, None, shifted), rotary(tokens)) < 1e-12
    assert relative_difference(learned(tokens, None, shifted), learned(tokens)) > 1e-3


def test_the_mask_of_documents_is_made_once_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.model import attention

    calls: list[int] = []
    real = torch.searchsorted
    monkeypatch.setattr(attention.torch, "searchsorted", lambda *a, **k: calls.append(1) or real(*a, **k))
    small_decoder("llama")(some_tokens(2, 12), packed(5, 12, end=24))
    assert len(calls) == 1


def test_another_attention_can_be_given() -> None:
    seen: list[Documents | None] = []

    def first_value(q: Tensor, k: Tensor, v: Tensor, documents: Documents | None, **_: Any) -> Tensor:
        seen.append(documents)
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)

    spec, documents = small_spec("llama"), packed(12, end=24)
    model = Decoder(spec, attention=first_value)
    other = Decoder(spec)
    other.load_state_dict(model.state_dict())
    other.replace_attention(first_value)
    assert torch.equal(model(some_tokens(2, 12), documents), other(some_tokens(2, 12), documents))
    assert len(seen) == 4 and all(d is documents for d in seen)


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_autocast_stays_near_fp32(family: str) -> None:
    """bf16 keeps 8 bits: 2 % of the gradient's norm over two layers."""
    model, tokens = small_decoder(family, torch.float32), some_tokens(2, 24)
    wide = gradients(model, tokens, None)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = gradients(model, tokens, None)
        packed_narrow = gradients(model, tokens, packed(9, 24, end=48))
    packed_wide = gradients(model, tokens, packed(9, 24, end=48))
    for expected, found in ((wide, narrow), (packed_wide, packed_narrow)):
        assert all(g.dtype == torch.float32 for g in found)
        assert relative_norm(torch.cat(found), torch.cat(expected)) < 0.02


def test_pure_bf16_runs() -> None:
    model = small_decoder("qwen", torch.bfloat16)
    assert model(some_tokens(2, 12)).dtype == torch.bfloat16


def test_inference_mode_leaves_nothing_behind_that_training_trips_over() -> None:
    model, tokens = small_decoder("llama"), some_tokens(2, 12)
    with torch.inference_mode():
        model(tokens, packed(12, end=24))
    model(tokens, packed(12, end=24)).sum().backward()


def test_the_meta_device_gives_shapes() -> None:
    model = Decoder(small_spec("llama"), device="meta")
    assert model(torch.zeros(3, 7, dtype=torch.int64, device="meta")).shape == (3, 7, 64)


def test_tied_embeddings_are_one_parameter_after_materialisation_and_copying() -> None:  # BL-51
    model = small_decoder("tiny")
    for one in (model, copy.deepcopy(model), Decoder(model.spec, device="meta").to_empty(device="cpu").double()):
        initialise(one, model.spec, 0, "cpu")
        assert len([n for n, _ in one.named_parameters() if "embedding" in n or "head" in n]) == 1
        one(some_tokens(1, 4))[..., 5].sum().backward()
        grad = one.embedding.weight.grad
        # Token 5 is not in the input: its row has a gradient from the output side alone.
        assert 5 not in some_tokens(1, 4) and grad is not None and grad[5].abs().sum() > 0
        assert grad[some_tokens(1, 4)[0, 0]].abs().sum() > 0


def test_a_sequence_too_long_is_refused_with_the_key() -> None:
    with pytest.raises(JobError, match="65 tokens, but the model takes at most 64") as caught:
        small_decoder("tiny")(some_tokens(1, 65))
    assert caught.value.key == "data.sequence_length"


@pytest.mark.parametrize(
    ("family", "bf16", "keys"),
    [
        ("llama", True, {}),
        ("llama", False, {"dropout": 0.1, "attention_dropout": 0.1}),
        ("qwen", False, {}),
        ("gpt2", True, {}),
    ],
)
def test_all_blocks_compile_as_one_without_a_break(family: str, bf16: bool, keys: dict[str, float]) -> None:
    """One graph for three layers, three batches and every number of documents; equal to the eager block."""
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")
    eager = small_decoder(family, torch.float32, num_layers=3, **keys)
    compiled = copy.deepcopy(eager)
    for block in compiled.blocks.values():
        block.compile(backend=backend, fullgraph=True)
    for step in range(3):
        tokens, key = some_tokens(2, 12, seed=step), DropoutKey(1, step, torch.tensor([step, 9]))
        documents = packed(*range(3, 4 + step), 12, 20 - step, end=24)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            expected = gradients(eager, tokens, documents, key)
            found = gradients(compiled, tokens, documents, key)
        assert relative_norm(torch.cat(found), torch.cat(expected)) < (0.02 if bf16 else 1e-5)
    assert backend.frame_count == 1
    torch._dynamo.reset()


def test_evaluation_after_training_costs_one_more_graph() -> None:
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("eager")
    model = small_decoder("llama", torch.float32, num_layers=3)
    for block in model.blocks.values():
        block.compile(backend=backend, fullgraph=True)
    for training in (True, False, True, False):
        model.train(training)
        with torch.set_grad_enabled(training):
            model(some_tokens(2, 12))
    assert backend.frame_count <= 2
    torch._dynamo.reset()


def gradients(
    model: Decoder, tokens: Tensor, documents: Documents | None, key: DropoutKey | None = None
) -> list[Tensor]:
    model.zero_grad()
    logits = model(tokens, documents, None, key).float()
    logits.pow(2).mean().backward()
    return [p.grad.flatten() for p in model.parameters() if p.grad is not None]


def relative_difference(found: Tensor | None, expected: Tensor | None) -> float:
    assert found is not None and expected is not None
    return float((found - expected).detach().abs().max() / expected.detach().abs().max())


def relative_norm(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())

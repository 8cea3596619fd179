"""The chunked head and loss against the logits taken whole, in value and gradients.

Tolerances: float64 1e-12, float32 1e-6, and bf16 and fp16 by their own rounding (2^-8, 2^-11) times a small factor.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.loss.chunked import head_cross_entropy
from paceline.loss.cost import CHUNK_LOGITS_BYTES, auto_chunk_tokens
from paceline.train.language import language_functions
from tests.model.models import small_decoder, some_tokens

TOKENS, DIM, VOCABULARY = (3, 37), 24, 101


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    h_BLD = torch.randn(*TOKENS, DIM, generator=generator, dtype=torch.float64).to(dtype)
    weight_VD = torch.randn(VOCABULARY, DIM, generator=generator, dtype=torch.float64).to(dtype)
    labels_BL = torch.randint(0, VOCABULARY, TOKENS, generator=generator)
    labels_BL[torch.rand(TOKENS, generator=generator) < 0.3] = -100
    return h_BLD.requires_grad_(), weight_VD.requires_grad_(), labels_BL


def whole(h_BLD: Tensor, weight_VD: Tensor, labels_BL: Tensor) -> Tensor:
    logits = F.linear(h_BLD, weight_VD).flatten(0, 1)
    return F.cross_entropy(logits, labels_BL.flatten(), ignore_index=-100, reduction="sum")


def relative(found: Tensor, wanted: Tensor) -> float:
    return float(torch.linalg.vector_norm(found.double() - wanted) / torch.linalg.vector_norm(wanted))


@pytest.mark.parametrize("chunk", [1, 16, 64, 111, 500])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 8e-3), (torch.float16, 2e-3)],
)
def test_value_and_gradients_are_those_of_whole_logits(chunk: int, dtype: torch.dtype, tolerance: float) -> None:
    h_BLD, weight_VD, labels_BL = inputs(dtype)
    loss = head_cross_entropy(h_BLD, weight_VD, labels_BL, chunk)
    (loss * 0.125).backward()
    h64, w64 = (t.detach().double().requires_grad_() for t in (h_BLD, weight_VD))
    wanted = whole(h64, w64, labels_BL)
    (wanted * 0.125).backward()
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert relative(loss.detach(), wanted.detach()) < tolerance
    for found, reference in ((h_BLD, h64), (weight_VD, w64)):
        assert found.grad is not None and reference.grad is not None
        assert found.grad.dtype == dtype
        assert relative(found.grad, reference.grad) < tolerance
    ignored = labels_BL == -100
    assert torch.equal(h_BLD.grad[ignored], torch.zeros_like(h_BLD.grad[ignored]))  # type: ignore[index]


def test_float16_gradients_do_not_underflow() -> None:
    """A softmax weight of 1e-9 is 0 in float16; times a loss scale of 2^20 it is not."""
    weight_VD = torch.zeros(4, 8, dtype=torch.float16)
    weight_VD[0] = 1.0
    weight_VD.requires_grad_()
    h_BLD = torch.full((1, 2, 8), 2.6, dtype=torch.float16)
    scale = 2.0**20
    (head_cross_entropy(h_BLD, weight_VD, torch.zeros(1, 2, dtype=torch.int64), 1) * scale).backward()
    h64, w64 = h_BLD.double(), weight_VD.detach().double().requires_grad_()
    whole(h64, w64, torch.zeros(1, 2, dtype=torch.int64)).backward()
    assert weight_VD.grad is not None and w64.grad is not None
    assert relative(weight_VD.grad[1:].double() / scale, w64.grad[1:]) < 0.01


def test_without_labels_the_loss_and_its_gradients_are_zero() -> None:
    h_BLD, weight_VD, labels_BL = inputs(torch.float32)
    loss = head_cross_entropy(h_BLD, weight_VD, torch.full_like(labels_BL, -100), 16)
    loss.backward()
    assert loss == 0
    assert h_BLD.grad is not None and not h_BLD.grad.any()
    assert weight_VD.grad is not None and not weight_VD.grad.any()


def test_a_frozen_head_and_evaluation_make_no_gradient() -> None:
    h_BLD, weight_VD, labels_BL = inputs(torch.float64)
    head_cross_entropy(h_BLD, weight_VD.detach(), labels_BL, 16).backward()
    assert h_BLD.grad is not None
    with torch.no_grad():
        assert not head_cross_entropy(h_BLD, weight_VD, labels_BL, 16).requires_grad


def test_a_second_backward_over_one_graph_is_refused() -> None:
    h_BLD, weight_VD, labels_BL = inputs(torch.float32)
    loss = head_cross_entropy(h_BLD, weight_VD, labels_BL, 16)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("family", ["llama", "gpt2"])  # a head of its own, and one tied to the embedding
@pytest.mark.parametrize("bf16", [False, True])
def test_a_decoder_trains_alike(family: str, bf16: bool) -> None:
    dtype = torch.float32 if bf16 else torch.float64
    labels = some_tokens(2, 24, seed=4)
    labels[0, 5:9] = -100
    batch = {"tokens": some_tokens(2, 24), "labels": labels}
    results = []
    for chunk in (0, 7):
        model = small_decoder(family, dtype)
        forward, loss = language_functions(model.spec, 0, chunk_tokens=chunk)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss_sum, weight = loss(forward(model, batch), batch)
        loss_sum.backward()
        assert weight == 44
        results.append((loss_sum.detach(), {n: p.grad for n, p in model.named_parameters()}))
    (wanted, wanted_grads), (found, grads) = results
    assert float(found) == pytest.approx(float(wanted), rel=1e-3 if bf16 else 1e-12)
    largest = max(float(torch.linalg.vector_norm(g)) for g in wanted_grads.values() if g is not None)
    for name, gradient in grads.items():
        assert gradient is not None
        # A key's bias has no true gradient: only rounding is left of it, so the scale is that of all gradients.
        distance = torch.linalg.vector_norm(gradient - wanted_grads[name])
        assert float(distance) < (0.05 if bf16 else 1e-12) * largest, name


def test_auto_chunks_only_where_logits_are_large() -> None:
    assert auto_chunk_tokens(2048, 2048, "cpu") == 0
    chunk = auto_chunk_tokens(2048, 131072, "cpu")
    assert chunk == CHUNK_LOGITS_BYTES["cpu"] // (4 * 131072) == 128
    assert auto_chunk_tokens(16384, 2**22, "cpu") == 16

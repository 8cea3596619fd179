"""The loss against a definition in plain Python, its gradients, and both of its code paths."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from paceline.loss import cross_entropy
from paceline.loss.cross_entropy import token_cross_entropy


@pytest.fixture(params=["whole", "chunked"])
def _path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = 2**30 if request.param == "whole" else 3 * 11 * 4
    monkeypatch.setitem(cross_entropy.CHUNK_BYTES, "cpu", chunk)


def case(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(2, 5, 11, generator=generator) * 3).to(dtype).requires_grad_()
    labels = torch.randint(0, 11, (2, 5), generator=generator)
    labels[0, 1] = labels[1, 3] = -100
    return logits, labels


@pytest.mark.usefixtures("_path")
def test_sum_and_weight_are_those_of_the_definition() -> None:
    logits, labels = case()
    expected = 0.0
    for b in range(2):
        for position in range(5):
            if labels[b, position] != -100:
                row = logits[b, position].tolist()
                expected += math.log(sum(math.exp(z) for z in row)) - row[labels[b, position]]
    loss_sum, weight = token_cross_entropy(logits, labels)
    assert loss_sum.item() == pytest.approx(expected, rel=1e-13) and weight.item() == 8


@pytest.mark.usefixtures("_path")
def test_gradients() -> None:
    logits, labels = case()
    assert torch.autograd.gradcheck(lambda x: token_cross_entropy(x, labels)[0] * 0.3, (logits,), fast_mode=True)


@pytest.mark.usefixtures("_path")
def test_parts_add_up_to_the_whole() -> None:
    """A sum over micro-batches of unequal weight, divided once, is the mean over all tokens."""
    logits, labels = case()
    whole, weight = token_cross_entropy(logits, labels)
    parts = [token_cross_entropy(logits[b : b + 1], labels[b : b + 1]) for b in range(2)]
    assert sum(p[0].item() for p in parts) == pytest.approx(whole.item(), rel=1e-14)
    assert sum(p[1].item() for p in parts) == weight.item()


@pytest.mark.usefixtures("_path")
def test_a_batch_without_labels_gives_zero_and_zero_gradients() -> None:
    logits, labels = case()
    loss_sum, weight = token_cross_entropy(logits, torch.full_like(labels, -100))
    loss_sum.backward()
    assert (loss_sum.item(), weight.item()) == (0.0, 0)
    assert logits.grad is not None and not logits.grad.any()


@pytest.mark.usefixtures("_path")
def test_another_number_can_mean_ignore() -> None:
    logits, labels = case()
    other = labels.where(labels != -100, 10)
    loss_sum, weight = token_cross_entropy(logits, other, ignore=10)
    kept = other != 10
    expected, _ = token_cross_entropy(logits, other.where(kept, -100))
    assert torch.equal(loss_sum, expected) and weight == kept.sum()


@pytest.mark.usefixtures("_path")
@pytest.mark.parametrize("autocast", [False, True])
def test_bf16_logits_are_summed_in_fp32(autocast: bool) -> None:
    logits, labels = case(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss_sum, _ = token_cross_entropy(logits, labels)
    assert loss_sum.dtype == torch.float32
    exact = logits.detach().double().requires_grad_()
    expected, _ = token_cross_entropy(exact, labels)
    assert loss_sum.item() == pytest.approx(expected.item(), rel=1e-6)
    loss_sum.backward()
    expected.backward()
    assert logits.grad is not None and exact.grad is not None and logits.grad.dtype == torch.bfloat16
    assert (logits.grad - exact.grad).abs().max() < 2**-8


@pytest.mark.usefixtures("_path")
def test_huge_logits_stay_finite() -> None:
    logits = torch.tensor([[[1e4, -1e4, 0.0]]], requires_grad=True)
    loss_sum, _ = token_cross_entropy(logits, torch.tensor([[1]]))
    loss_sum.backward()
    assert loss_sum.item() == 2e4 and logits.grad is not None and bool(logits.grad.isfinite().all())


def test_large_logits_are_taken_in_chunks_and_compile_takes_them_whole() -> None:
    logits = torch.randn(2, 64, 4096, generator=torch.Generator().manual_seed(0), requires_grad=True)
    labels = torch.randint(0, 4096, (2, 64), generator=torch.Generator().manual_seed(1))
    chunked, _ = token_cross_entropy(logits, labels)
    assert "Chunked" in type(chunked.grad_fn).__name__
    compiled = torch.compile(token_cross_entropy, backend="aot_eager", fullgraph=True)
    whole, weight = compiled(logits, labels)
    assert weight == 128 and whole.item() == pytest.approx(chunked.item(), rel=1e-6)
    (one,) = torch.autograd.grad(chunked, logits)
    (other,) = torch.autograd.grad(whole, logits)
    assert torch.allclose(one, other, atol=1e-7)

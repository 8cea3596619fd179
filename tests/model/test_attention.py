"""The kernels behind the default attention, each against attention written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.model import attention
from paceline.model.attention import Documents, plain, sdpa
from paceline.model.attention_cpu import WIDEST_HEAD, wants_wide_backward

DOCUMENTS = Documents(torch.tensor([0, 7, 16, 19, 32], dtype=torch.int32), 13)


def inputs(width: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """Queries of 4 heads, keys and values of 2, over 2 sequences of 16."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 16, 4, width), (2, 16, 2, width), (2, 16, 2, width)]
    made = [torch.randn(shape, generator=generator).to(device, dtype).transpose(1, 2) for shape in shapes]
    return [x.requires_grad_() for x in made]


def gradients(kernel: Any, tensors: list[Tensor], documents: Documents | None) -> list[Tensor]:
    output = kernel(*tensors, documents, scale=0.3, dropout=None)
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    return [output.detach(), *torch.autograd.grad(output, tensors, direction)]


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
@pytest.mark.parametrize(("width", "dtype", "tolerance"), [(8, torch.float64, 1e-13), (8, torch.float32, 1e-5)])
def test_sdpa_is_attention_written_out(
    documents: Documents | None, width: int, dtype: torch.dtype, tolerance: float
) -> None:
    found, expected = (gradients(kernel, inputs(width, dtype), documents) for kernel in (sdpa, plain))
    assert all(torch.allclose(a, b, atol=tolerance) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
@pytest.mark.parametrize("width", [WIDEST_HEAD, 64])
def test_bf16_on_a_cpu_is_as_near_to_fp64_as_its_inputs(documents: Documents | None, width: int) -> None:
    """Both kernels of bf16, narrow heads and wide ones: 1 % of each gradient's norm (bf16 has 8 bits)."""
    tensors = inputs(width, torch.bfloat16)
    assert wants_wide_backward(tensors[0]) is (width == WIDEST_HEAD)
    exact = gradients(plain, [x.detach().double().requires_grad_() for x in tensors], documents)
    for found, expected in zip(gradients(sdpa, tensors, documents), exact, strict=True):
        assert found.dtype == torch.bfloat16
        assert (found.double() - expected).norm() < 0.01 * expected.norm()


def test_the_variable_length_kernel_is_given_flat_causal_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call that CUDA gets, answered by attention over each document by itself."""

    def by_document(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, *args: Any, **keys: Any) -> Tensor:
        borders, same, max_q, max_k = args
        assert same is borders and (max_q, max_k) == (13, 13)
        assert keys == {"scale": 0.3, "window_size": (-1, 0), "enable_gqa": True}
        parts = [
            plain(*(x[a:b].transpose(0, 1).unsqueeze(0) for x in (q_THK, k_TGK, v_TGK)), None, scale=0.3, dropout=None)
            for a, b in zip(borders.tolist(), borders.tolist()[1:], strict=False)
        ]
        return torch.cat([part[0].transpose(0, 1) for part in parts])

    tensors = inputs(8, torch.float64)
    expected = gradients(plain, tensors, DOCUMENTS)
    monkeypatch.setattr(attention, "varlen_attn", by_document)
    monkeypatch.setattr(attention, "takes_lengths", lambda device, dtype: True)
    found = gradients(sdpa, tensors, DOCUMENTS)
    assert all(torch.allclose(a, b, atol=1e-13) for a, b in zip(found, expected, strict=True))


def test_padded_borders_are_the_same_documents() -> None:
    padded = DOCUMENTS.padded(13)
    assert padded.cumulative.numel() in (4, 8, 16) and padded.cumulative.numel() >= DOCUMENTS.cumulative.numel()
    tensors = inputs(8, torch.float64)
    for found, expected in zip(gradients(plain, tensors, padded), gradients(plain, tensors, DOCUMENTS), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_cuda_kernels(documents: Documents | None, dtype: torch.dtype) -> None:
    tensors = inputs(64, dtype, "cuda")
    if documents is not None:
        documents = documents._replace(cumulative=documents.cumulative.cuda())
    exact = gradients(plain, [x.detach().double().requires_grad_() for x in tensors], documents)
    for found, expected in zip(gradients(sdpa, tensors, documents), exact, strict=True):
        assert (found.double() - expected).norm() < 0.01 * expected.norm()

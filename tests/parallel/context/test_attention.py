"""Attention over a split sequence against the same attention in one process, in float64."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.model.attention import Attention, Documents, sdpa
from paceline.model.dropout import AttentionDropout
from paceline.parallel.context import kernel
from paceline.parallel.context.attention import ExchangedAttention, GatheredAttention
from paceline.parallel.context.kernel import Part
from paceline.parallel.context.split import own_positions
from tests.pool.pool import Pool

TOLERANCE = 1e-9
BATCH, LENGTH, WIDTH = 2, 48, 8
METHODS = {"gather": GatheredAttention, "alltoall": ExchangedAttention}


class Setting(NamedTuple):
    """What attention is asked for: heads, documents, dropout."""

    heads: int
    kv_heads: int
    documents: bool = False
    dropout: bool = False


SETTINGS = [Setting(*heads, *rest) for heads, rest in itertools.product(
    [(12, 12), (12, 6), (12, 1)], [(False, False), (True, False), (False, True), (True, True)]
)]  # fmt: skip


def inputs(setting: Setting) -> tuple[list[Tensor], Documents | None, AttentionDropout | None, Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = [(BATCH, h, LENGTH, WIDTH) for h in (setting.heads, setting.kv_heads, setting.kv_heads, setting.heads)]
    *qkv, up = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    # Documents inside a chunk, across chunks and across ranks; the second sequence has others than the first.
    cumulative = torch.tensor([0, 3, 4, 21, 29, 48, 58, 96], dtype=torch.int32)
    documents = Documents(cumulative, 38) if setting.documents else None
    dropped = AttentionDropout(0.3, torch.tensor([5, 9]), torch.arange(LENGTH)[None], torch.arange(setting.heads))
    return qkv, documents, dropped if setting.dropout else None, up


def attend(attention: Attention, setting: Setting, positions: Tensor) -> list[Tensor]:
    """Output and gradients, at some positions of the sequence."""
    qkv, documents, dropped, up = inputs(setting)
    own = [x[:, :, positions].requires_grad_() for x in qkv]
    if dropped is not None:
        dropped = dropped._replace(positions_BL=positions[None])
    output = attention(*own, documents, scale=0.3, dropout=dropped)
    output.backward(up[:, :, positions])
    return [output.detach(), *(x.grad for x in own if x.grad is not None)]


def on_ranks(rank: int, world_size: int, method: str, settings: list[Setting]) -> tuple[Tensor, list[list[Tensor]]]:
    group = dist.group.WORLD
    assert group is not None
    positions = own_positions(rank, world_size, LENGTH)
    return positions, [attend(METHODS[method](group), setting, positions) for setting in settings]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("method", METHODS)
def test_a_split_sequence_attends_like_a_whole_one(pool: Pool, method: str, ranks: int) -> None:
    settings = [s for s in SETTINGS if method == "gather" or s.kv_heads % ranks == 0 or ranks % s.kv_heads == 0]
    wanted = [attend(sdpa, setting, torch.arange(LENGTH)) for setting in settings]
    for positions, outcomes in pool.run(on_ranks, ranks, method, settings, timeout=60.0):
        for setting, want, found in zip(settings, wanted, outcomes, strict=True):
            for whole, own in zip(want, found, strict=True):
                assert (own - whole[:, :, positions]).norm() / whole.norm() < TOLERANCE, setting


def low_precision(rank: int, world_size: int, method: str) -> list[Tensor]:
    group = dist.group.WORLD
    assert group is not None
    positions = own_positions(rank, world_size, LENGTH)
    qkv, _, _, up = inputs(Setting(4, 2))
    own = [x[:, :, positions].bfloat16().requires_grad_() for x in qkv]
    output = METHODS[method](group)(*own, None, scale=0.3, dropout=None)
    output.backward(up[:, :, positions].bfloat16())
    return [positions, output.detach(), *(x.grad for x in own if x.grad is not None)]


@pytest.mark.parametrize("method", METHODS)
def test_bf16_is_as_close_as_bf16_in_one_process(pool: Pool, method: str) -> None:
    wanted = attend(sdpa, Setting(4, 2), torch.arange(LENGTH))
    for positions, *found in pool.run(low_precision, 2, method):
        for whole, own in zip(wanted, found, strict=True):
            assert own.dtype == torch.bfloat16
            assert (own - whole[:, :, positions]).norm() / whole[:, :, positions].norm() < 1e-2


def kept(rank: int, world_size: int, length: int) -> int:
    """Bytes that one attention keeps for its backward pass."""
    group = dist.group.WORLD
    assert group is not None
    q, k, v = (torch.randn(1, h, length // world_size, WIDTH, requires_grad=True) for h in (4, 2, 2))
    found: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        GatheredAttention(group)(q, k, v, None, scale=0.3, dropout=None)
    return sum(found.values())


def test_what_is_kept_for_the_backward_falls_by_the_degree(pool: Pool) -> None:
    alone = pool.run(kept, 1, 4096)[0]
    assert pool.run(kept, 2, 4096) == [alone // 2] * 2
    assert pool.run(kept, 4, 4096) == [alone // 4] * 4


BIAS = torch.zeros(2, 1, 16, 24, dtype=torch.float64)
BIAS[..., 1::2], BIAS[1, :, 3, :5] = float("-inf"), float("-inf")


@pytest.mark.parametrize(
    "part", [Part(slice(0, 24)), Part(slice(8, 24), causal=True), Part(slice(0, 24), bias_B1QS=BIAS)],
    ids=["all", "causal", "bias"],
)  # fmt: skip
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_written_out_kernel_is_the_fused_one(part: Part, kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused one is torch's for CPUs; what is written out serves devices and types without one."""
    monkeypatch.setattr(kernel, "ROWS", 5)
    generator = torch.Generator().manual_seed(3)
    q, grad = (torch.randn(2, 4, 16, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(2, kv_heads, 24, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    own_k, own_v = k[:, :, part.keys], v[:, :, part.keys]
    fused, written = kernel.forward(q, k, v, part, 0.3), kernel.written_out(q, own_k, own_v, part, 0.3)
    grads = kernel.backward(grad, q, k, v, part, 0.3, *fused)
    written_grads = kernel.written_out_backward(grad, q, own_k, own_v, *fused, part, 0.3)
    for a, b in zip((*fused, *grads), (*written, *written_grads), strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)


def test_parts_that_share_no_key_merge_into_the_whole() -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 4, n, 8, generator=generator, dtype=torch.float64) for n in (16, 24, 24))
    parts = [kernel.forward(q, k, v, Part(keys), 0.3) for keys in (slice(0, 7), slice(7, 24))]
    for a, b in zip(kernel.merge(*parts), kernel.forward(q, k, v, Part(slice(0, 24)), 0.3), strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("part", [Part(slice(0, 24)), Part(slice(8, 24), causal=True)], ids=["all", "causal"])
def test_cuda_kernels_are_called_as_they_are_declared(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments and shapes only, by torch's own rules for them: nothing is computed, and no GPU is needed."""
    monkeypatch.setattr(kernel, "_has_flash", lambda q, part: True)
    q, k, v = (torch.empty(2, h, n, 64, dtype=torch.bfloat16, device="meta") for h, n in ((4, 16), (2, 24), (2, 24)))
    output, logsumexp = kernel.forward(q, k, v, part, 0.3)
    assert output.shape == q.shape
    assert logsumexp.shape == q.shape[:3]
    grads = kernel.backward(q, q, k, v, part, 0.3, output, logsumexp)
    keys = len(range(*part.keys.indices(24)))
    assert [g.shape for g in grads] == [q.shape, (2, 2, keys, 64), (2, 2, keys, 64)]

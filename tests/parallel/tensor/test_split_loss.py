"""The loss over logits that are split by vocabulary, on every rank: its sum, its gradient and what it holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from paceline.loss import cross_entropy
from paceline.loss.chunked import head_cross_entropy
from paceline.loss.cross_entropy import token_cross_entropy
from paceline.loss.split_cross_entropy import split_cross_entropy
from paceline.loss.vocabulary import VocabularyPart
from tests.parallel.live_bytes import LiveBytes
from tests.pool.pool import Pool

VOCABULARY = 11
"""Does not divide by 2, 3 or 4."""


def case(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 5, VOCABULARY, generator=generator, dtype=torch.float64) * 3
    labels = torch.randint(0, VOCABULARY, (2, 5), generator=generator)
    labels[0, 1] = labels[1, 3] = -100
    return logits, labels


def own(ranks: int, rank: int, vocabulary: int = VOCABULARY) -> slice:
    return slice(vocabulary * rank // ranks, vocabulary * (rank + 1) // ranks)


def sum_and_gradients(rank: int, ranks: int, rows_at_a_time: int) -> dict[str, Any]:
    """What the split loss gives on this rank, and the difference quotients of its own columns."""
    cross_entropy.CHUNK_BYTES["cpu"] = rows_at_a_time * 4 * (VOCABULARY // ranks)
    logits, labels = case()
    columns = own(ranks, rank)
    part = VocabularyPart(columns.start, dist.group.WORLD)
    mine = logits[..., columns].clone().requires_grad_()
    loss = split_cross_entropy(mine, labels, part)
    (loss * 0.3).backward()
    assert mine.grad is not None
    quotients = torch.zeros_like(logits)
    # Every rank shifts the same number of the whole logits, whoever has it; all ranks evaluate together.
    for at in range(logits.numel()):
        values = []
        for shift in (1e-6, -1e-6):
            moved = logits.clone()
            moved.view(-1)[at] += shift
            values.append(0.3 * split_cross_entropy(moved[..., columns], labels, part))
        quotients.view(-1)[at] = (values[0] - values[1]) / 2e-6
    return {"loss": loss.item(), "grad": mine.grad, "quotients": quotients[..., columns]}


@pytest.mark.parametrize(("ranks", "rows"), [(2, 100), (3, 3), (4, 100)])
def test_sum_and_gradient_on_every_rank(pool: Pool, ranks: int, rows: int) -> None:
    # BL-55, BL-92: not too high by a log of the ranks; minus one on the owner of the label's row alone; ignored labels.
    logits, labels = case()
    logits.requires_grad_()
    whole, _ = token_cross_entropy(logits, labels)
    (whole * 0.3).backward()
    assert logits.grad is not None
    for rank, found in enumerate(pool.run(sum_and_gradients, ranks, rows)):
        assert found["loss"] == pytest.approx(whole.item(), rel=1e-14)
        torch.testing.assert_close(found["grad"], logits.grad[..., own(ranks, rank)], rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(found["grad"], found["quotients"], rtol=1e-6, atol=1e-8)


def extremes(rank: int, ranks: int) -> dict[str, Any]:
    logits = torch.zeros(1, 3, VOCABULARY)
    logits[0, 0, 0], logits[0, 1, -1] = 1e4, 1e4
    labels = torch.tensor([[0, 0, -100]])
    part = VocabularyPart(own(ranks, rank).start, dist.group.WORLD)
    found = [split_cross_entropy(logits[..., own(ranks, rank)], labels, part).item()]
    nothing = logits[..., own(ranks, rank)].clone().requires_grad_()
    found.append(split_cross_entropy(nothing, torch.full((1, 3), -100), part).item())
    split_cross_entropy(nothing, torch.full((1, 3), -100), part).backward()
    assert nothing.grad is not None
    return {"found": found, "grad": float(nothing.grad.abs().max())}


def test_large_logits_and_batches_without_labels(pool: Pool) -> None:
    for found in pool.run(extremes, 3):
        assert found == {"found": [1e4, 0.0], "grad": 0.0}


def through_the_head(rank: int, ranks: int, chunk: int, dtype: torch.dtype) -> dict[str, Any]:
    """Sum, gradient of the head's input (summed over ranks, as whoever split it does) and of this rank's rows."""
    generator = torch.Generator().manual_seed(1)
    h = torch.randn(2, 5, 6, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, 6, generator=generator, dtype=torch.float64)
    rows = own(ranks, rank)
    mine = weight[rows].to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    part = VocabularyPart(rows.start, dist.group.WORLD)
    loss = head_cross_entropy(h, mine, case()[1], chunk, part=part)
    (loss * 0.3).backward()
    assert h.grad is not None and mine.grad is not None
    grad = h.grad.double()
    dist.all_reduce(grad)
    return {"loss": loss.item(), "h": grad, "weight": mine.grad.double()}


@pytest.mark.parametrize(("dtype", "rel"), [(torch.float64, 1e-12), (torch.float16, 4e-3)])
def test_in_chunks_with_the_head(pool: Pool, dtype: torch.dtype, rel: float) -> None:
    generator = torch.Generator().manual_seed(1)
    h = torch.randn(2, 5, 6, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(VOCABULARY, 6, generator=generator, dtype=torch.float64).requires_grad_()
    loss, _ = token_cross_entropy(F.linear(h, weight), case()[1])
    (loss * 0.3).backward()
    assert h.grad is not None and weight.grad is not None
    for rank, found in enumerate(pool.run(through_the_head, 3, 4, dtype)):
        assert found["loss"] == pytest.approx(loss.item(), rel=rel)
        torch.testing.assert_close(found["h"], h.grad, rtol=rel, atol=rel)
        torch.testing.assert_close(found["weight"], weight.grad[own(3, rank)], rtol=rel, atol=rel)


def held_bytes(rank: int, ranks: int, vocabulary: int) -> dict[str, int]:
    """Bytes that this rank's logits are, that the loss keeps beside them, and of its largest exchange."""
    logits = torch.randn(1, 64, len(range(vocabulary)[own(ranks, rank, vocabulary)])).requires_grad_()
    labels = torch.zeros(1, 64, dtype=torch.int64)
    with LiveBytes([logits]) as live:
        loss = split_cross_entropy(logits, labels, VocabularyPart(own(ranks, rank, vocabulary).start, dist.group.WORLD))
        kept = live.count()
    loss.backward()
    return {"logits": logits.numel() * 4, "kept": kept}


def test_memory_of_logits_falls_by_the_degree(pool: Pool) -> None:
    whole = 64 * 4096 * 4
    for ranks in (2, 4):
        for found in pool.run(held_bytes, ranks, 4096):
            assert found["logits"] == whole // ranks
            # A few numbers for each of the 64 tokens, and nothing of the size of logits.
            assert found["kept"] < 64 * 8 * 12

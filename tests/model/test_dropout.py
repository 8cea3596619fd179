"""Dropout's masks: what they depend on, what they do not, and that they drop the share they say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.model.dropout import (
    ATTENTION,
    ATTENTION_OUTPUT,
    MLP_OUTPUT,
    AttentionDropout,
    DropoutKey,
    block_keys,
    drop_attention,
    dropout,
)
from tests.model.models import small_decoder, some_tokens

POSITIONS = torch.arange(32).unsqueeze(0)


def mask(seed: int = 1, step: int = 2, sample: int = 3, layer: int = 0, site: int = ATTENTION_OUTPUT) -> Tensor:
    keys = block_keys(DropoutKey(seed, step, torch.tensor([sample])), 4)
    return dropout(torch.ones(1, 32, 64), 0.25, keys[layer, site], POSITIONS)[0] == 0


@pytest.mark.parametrize(
    "other",
    [
        mask(seed=0), mask(step=3), mask(sample=4), mask(layer=1), mask(site=MLP_OUTPUT), mask(seed=1 + 2**32),
        mask(sample=3 + 2**40), mask().roll(1, 0), mask().roll(1, 1),
    ],
)  # fmt: skip
def test_masks_differ_by_seed_step_sample_layer_site_and_position(other: Tensor) -> None:
    """Independent masks at 0.25 agree on 0.625 of the places; 2,048 places have a deviation of 0.011."""
    assert (mask() == other).double().mean().item() == pytest.approx(0.625, abs=0.055)


def test_the_share_dropped_is_the_rate_in_every_row_and_column() -> None:
    keys = block_keys(DropoutKey(7, 11, torch.arange(64)), 1)[0, MLP_OUTPUT]
    kept = dropout(torch.ones(64, 32, 64), 0.1, keys, POSITIONS)
    assert kept[kept != 0].unique().tolist() == pytest.approx([1 / 0.9])
    dropped = (kept == 0).double()
    assert dropped.mean().item() == pytest.approx(0.1, abs=0.004)
    for dims in ((0, 1), (0, 2), (1, 2)):
        assert (dropped.mean(dims) - 0.1).abs().max() < 0.035


def test_attention_weights_are_dropped_by_head_query_and_key() -> None:
    keys = block_keys(DropoutKey(7, 11, torch.arange(4)), 1)[0, ATTENTION]
    whole = AttentionDropout(0.3, keys, POSITIONS, torch.arange(8))
    kept = drop_attention(torch.ones(4, 8, 32, 32), whole)
    assert (kept == 0).double().mean().item() == pytest.approx(0.3, abs=0.02)
    flat = (kept == 0).flatten(2).flatten(0, 1)
    assert len({tuple(row.tolist()) for row in flat}) == 32
    later_heads = AttentionDropout(0.3, keys, POSITIONS, torch.arange(4, 8))
    assert torch.equal(drop_attention(torch.ones(4, 4, 32, 32), later_heads), kept[:, 4:])


def test_a_sample_has_the_same_mask_in_whatever_batch_it_stands() -> None:
    """Law 1 with dropout: forward in one batch of four, in two of two, in another order; float64, bit for bit."""
    model, tokens = small_decoder("llama", dropout=0.2, attention_dropout=0.2), some_tokens(4, 12)
    ids = torch.tensor([10, 11, 12, 13])

    def forward(rows: list[int]) -> Tensor:
        out: Tensor = model(tokens[rows], None, None, DropoutKey(1, 5, ids[rows]))
        return out

    whole = forward([0, 1, 2, 3])
    assert torch.allclose(torch.cat((forward([0, 1]), forward([2, 3]))), whole, atol=1e-12, rtol=0)
    assert torch.allclose(forward([3, 1]), whole[[3, 1]], atol=1e-12, rtol=0)
    assert not torch.allclose(model(tokens, None, None, DropoutKey(1, 6, ids)), whole, atol=1e-3)


def test_a_part_of_a_sequence_drops_what_the_whole_does() -> None:
    keys = block_keys(DropoutKey(1, 2, torch.tensor([5, 6])), 1)[0, ATTENTION_OUTPUT]
    whole = dropout(torch.ones(2, 32, 8), 0.5, keys, POSITIONS)
    assert torch.equal(dropout(torch.ones(2, 16, 8), 0.5, keys, POSITIONS[:, 16:]), whole[:, 16:])


def test_nothing_is_dropped_in_evaluation_and_a_key_is_demanded_in_training() -> None:
    model, plain, tokens = small_decoder("llama", dropout=0.5), small_decoder("llama"), some_tokens(1, 8)
    with pytest.raises(ValueError, match="dropout_key"):
        model(tokens)
    assert torch.equal(model.eval()(tokens), plain(tokens))

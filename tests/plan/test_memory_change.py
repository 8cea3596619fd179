"""What would make a setting fit: each change with what it frees, the cheapest first."""

from __future__ import annotations

from typing import Any

from paceline.parallel.layout import Layout
from paceline.plan.device_memory import predict_memory
from paceline.plan.memory_change import changes, cheapest, describe_change, words_of_changes
from paceline.plan.setting import Setting
from paceline.plan.verdict import fits
from tests.plan.settings import gpt, llama, setting


def large(**fields: Any) -> Setting:
    """Llama 3 8B on 8 devices of 80 GiB, two sequences of 8192 tokens at once."""
    given = {"software": "torchtitan-2024", "zero_stage": 3, "microbatch": 2, "layout": Layout(dp_shard=8), **fields}
    return setting(llama(), fused_attention=True, sequence_length=8192, **given)


def test_a_change_frees_what_its_setting_needs_less() -> None:
    job = large()
    before = predict_memory(job).device_bytes
    found = changes(job)
    assert len(found) >= 4
    for change in found:
        after = predict_memory(change.setting)
        assert change.freed_bytes == before - after.device_bytes > 0
        assert change.fits == fits(after)
        assert change.setting.global_batch == job.global_batch, change.change


def test_the_cheapest_change_that_fits_is_named_first() -> None:
    job = large()
    assert not fits(predict_memory(job))
    chosen = cheapest(job)
    assert chosen is not None and chosen.fits
    order = [change.change for change in changes(job) if change.fits]
    assert chosen.change == order[0]
    words = words_of_changes(job)
    assert words[0].startswith(chosen.change) and "which makes it fit" in words[0]
    assert any("alone is not enough" in sentence for sentence in words[1:])


def test_a_loss_in_chunks_comes_before_all_that_costs_speed() -> None:
    short = large(microbatch=1, recompute="selective", recomputed="every other product")
    assert changes(short)[0].change.startswith("A loss in chunks")
    assert changes(short)[0].freed_bytes > 8e9


def test_where_nothing_is_enough_the_largest_is_named() -> None:
    job = setting(llama(layers=320), fused_attention=True, sequence_length=8192, software="megatron-2023", microbatch=4)
    chosen = cheapest(job)
    assert chosen is not None and not chosen.fits
    assert chosen.freed_bytes == max(change.freed_bytes for change in changes(job))


def test_what_fits_needs_no_change_and_what_cannot_be_changed_says_so() -> None:
    assert words_of_changes(setting(gpt(layers=2))) == []
    assert "No single change" in describe_change(None)


def test_a_backward_in_two_parts_is_not_recomputed_and_heads_are_not_cut() -> None:
    split = setting(llama(), Layout(pp=4), fused_attention=True, software="paceline", schedule="zero-bubble",
                    accumulation=8, sequence_length=8192)  # fmt: skip
    assert not any("recomputation" in change.change for change in changes(split))
    half_node = large(layout=Layout(tp=4, dp_shard=2))
    assert any(change.change.startswith("tp 8") for change in changes(half_node))
    whole_node = large(layout=Layout(tp=8, dp_shard=2))
    assert not any(change.change.startswith("tp 16") for change in changes(whole_node))

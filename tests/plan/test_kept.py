"""Bytes that a block keeps: the closed forms of Korthikanti et al. 2022, and a Llama block tensor by tensor."""

from __future__ import annotations

import msgspec
import pytest

from paceline.parallel.layout import Layout
from paceline.plan.kept import block_bytes
from paceline.plan.memory_habits import habits_of
from paceline.plan.setting import Setting
from tests.plan.settings import gpt, llama, setting

S, B, H, A, T = 2048, 3, 1024, 16, 4
HABITS = habits_of("megatron-2022")


def of_gpt(**changes: object) -> Setting:
    return setting(gpt(width=H, heads=A), **{"microbatch": B, **changes})


# BL-84: activations by the published table, each row of it.
@pytest.mark.parametrize(
    ("changes", "per_number"),
    [
        ({}, 34 + 5 * A * S / H),
        ({"fused_attention": False, "layout": Layout(tp=T)}, 10 + 24 / T + 5 * A * S / (H * T)),
        ({"layout": Layout(tp=T), "sequence_parallel": True}, (34 + 5 * A * S / H) / T),
        (
            {"layout": Layout(tp=T), "sequence_parallel": True, "recompute": "selective", "recomputed": "attention"},
            34 / T,
        ),
        ({"recompute": "full"}, 2),
        ({"layout": Layout(tp=T), "sequence_parallel": True, "recompute": "full"}, 2 / T),
    ],
)
def test_a_gpt_block_keeps_what_the_published_table_says(changes: dict[str, object], per_number: float) -> None:
    assert block_bytes(of_gpt(**changes), HABITS).kept == pytest.approx(S * B * H * per_number, rel=1e-12)


def test_a_fused_attention_keeps_one_number_a_head_instead_of_the_scores() -> None:
    written, fused = (block_bytes(of_gpt(fused_attention=fused), HABITS).kept for fused in (False, True))
    assert written - fused == S * B * (5 * A * S - 4 * A)


def test_a_llama_block_keeps_its_tensors() -> None:
    """12 h + 4 k + 8 f + 4 a bytes a token, k numbers of keys (planner's derivation: 168 KB for Llama 3 8B)."""
    eager = setting(llama(), sequence_length=8192, fused_attention=True, software="torchtitan-2024")
    kept = block_bytes(eager, habits_of("torchtitan-2024")).kept / 8192
    assert kept == 12 * 4096 + 4 * 1024 + 8 * 14336 + 4 * 32
    assert kept / 1000 == pytest.approx(168, abs=0.1)


def test_selective_recomputation_of_products_keeps_every_second_one() -> None:
    chosen = setting(llama(), sequence_length=8192, fused_attention=True, software="torchtitan-2024",
                     recompute="selective", recomputed="every other product")  # fmt: skip
    kept = block_bytes(chosen, habits_of("torchtitan-2024")).kept / 8192
    assert kept == 2 * (4096 + 4096 + 1024 + 4096 + 14336 + 4096) + 4 * 32
    compiled = block_bytes(msgspec.structs.replace(chosen, compile=True), habits_of("torchtitan-2024")).kept / 8192
    assert kept - compiled == 2 * 4096, "a compiled block does not keep its last product, which no gradient needs"


def test_full_recomputation_of_half_the_blocks_keeps_the_mean_of_both() -> None:
    none, full, half = (
        block_bytes(of_gpt(recompute=recompute, recomputed_layers=share), HABITS).kept
        for recompute, share in (("none", 1.0), ("full", 1.0), ("full", 0.5))
    )
    assert half == pytest.approx((none + full) / 2)


def test_what_is_not_kept_is_worked_on() -> None:
    """Kept and computed anew add up to all that a block without recomputation keeps, gradients apart."""
    none, full = (block_bytes(of_gpt(recompute=recompute), HABITS) for recompute in ("none", "full"))
    assert full.kept + full.working == pytest.approx(none.kept + none.working)


def test_context_ranks_keep_their_share_and_work_on_keys_of_others() -> None:
    whole = setting(llama(), sequence_length=8192, fused_attention=True, software="megatron-2023")
    habits = habits_of("megatron-2023")
    ring, gather = (
        block_bytes(msgspec.structs.replace(whole, layout=Layout(cp=4), context_method=method), habits)
        for method in ("ring", "gather")
    )
    one = block_bytes(whole, habits)
    assert ring.kept == gather.kept == one.kept / 4
    assert 4 * ring.working - one.working == 8192 * 2 * 2 * 1024 * 2
    assert gather.working - ring.working == (8192 // 4) * 2 * 2 * 1024 * (4 - 2)

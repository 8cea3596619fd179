"""Memory of a run: the table of ZeRO, the heaviest stage, three figures, and our own engine to the byte."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from paceline.cluster.catalogue import device
from paceline.cluster.probe import probe_host
from paceline.job.load import load_job
from paceline.job.resolve import Resolved, resolve_job
from paceline.model.spec import parameter_count
from paceline.parallel.layout import Layout
from paceline.plan.device_memory import candidates, elements_of, predict_memory
from paceline.plan.setting import DeviceMemory, Setting
from paceline.plan.verdict import fits, oom_probability
from tests.plan.settings import gpt, llama, setting

STATE = ("parameters", "gradients", "master", "moments")


def state(memory: DeviceMemory) -> int:
    return sum(memory.parts[part] for part in STATE)


def own(resolved: Resolved, **changes: Any) -> Setting:
    """The setting of a job of ours."""
    found = msgspec.structs.replace(device("a100-sxm-80g"), kind=resolved.host.device_kind)
    fields: dict[str, Any] = {
        "name": "own", "spec": resolved.spec, "device": found, "nodes": 1, "devices_per_node": resolved.layout.world_size,
        "link": None, "fabric": None, "layout": resolved.layout, "microbatch": resolved.batch.microbatch,
        "accumulation": resolved.batch.accumulation, "sequence_length": resolved.job.data.sequence_length,
        "precision": resolved.precision, "recompute": resolved.transforms.recompute,
        "zero_stage": resolved.fsdp.zero_stage if resolved.layout.dp_shard > 1 else 0,
        "schedule": resolved.pipeline.schedule, "stages_per_rank": resolved.pipeline.stages_per_rank,
        "layers": resolved.pipeline.layers, "sequence_parallel": resolved.tensor.sequence_parallel,
        "context_method": resolved.context.method, "loss_chunk_tokens": resolved.transforms.loss_chunk_tokens,
        "reduce_every_microbatch": resolved.fsdp.reduce_every_microbatch, "software": "paceline",
        "parameter_dtype": resolved.transforms.parameter_dtype, "offload": resolved.transforms.offload,
        "ddp": resolved.ddp, "optimizer": resolved.job.optimizer,
    }  # fmt: skip
    return Setting(**{**fields, **changes})


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (1, []),
        (1, ["parallel.recompute=full", "batch.microbatch=2"]),
        (4, ["parallel.dp_replicate=4", "parallel.bucket_bytes=1MiB"]),
        (4, ["parallel.dp_shard=4"]),
        (4, ["parallel.dp_shard=4", "parallel.zero_stage=2", "batch.microbatch=1"]),
        (4, ["parallel.tp=2", "parallel.dp_shard=2"]),
        (4, ["parallel.cp=2", "parallel.dp_shard=2", "parallel.precision=bf16"]),
        (2, ["parallel.pp=2", "batch.microbatch=1"]),
        (2, ["parallel.pp=2", "parallel.pp_schedule=zero-bubble", "batch.microbatch=1", "parallel.compile=false"]),
        (1, ["optimizer.name=sgd"]),
        (1, ["parallel.precision=bf16", "parallel.parameter_dtype=bf16"]),
    ],
)
def test_a_job_of_ours_needs_what_the_engine_says(ranks: int, words: list[str]) -> None:
    resolved = resolve_job(load_job(None, ["model.num_layers=4", *words]), ranks, probe_host())
    memory = predict_memory(own(resolved))
    assert [stage.device_bytes for stage in memory.stages] == [m.total_bytes for m in resolved.stages]
    assert memory.stage == resolved.heaviest
    assert memory.device_bytes == resolved.memory.total_bytes
    assert memory.allocated_bytes == memory.device_bytes - resolved.memory.context_bytes - resolved.memory.reserve_bytes
    assert memory.parts["moments"] == resolved.memory.moments_bytes


# BL-84: which part falls with the number of shards, by stage. Rajbhandari et al. 2020, arXiv 1910.02054, figure 1.
@pytest.mark.parametrize(
    ("stage", "per_parameter"), [(0, 16.0), (1, 4 + 12 / 8), (2, 2 + 14 / 8), (3, 16 / 8)]
)  # fmt: skip
def test_state_by_stage_is_the_table_of_zero(stage: int, per_parameter: float) -> None:
    sharded = setting(gpt(), Layout(dp_shard=8), zero_stage=stage, software="mixed")
    assert state(predict_memory(sharded)) == pytest.approx(per_parameter * parameter_count(gpt()), abs=4)


def test_megatron_needs_18_bytes_a_parameter_and_6_and_12_over_the_shards() -> None:
    whole, sharded = (setting(gpt(), Layout(dp_shard=8), zero_stage=stage) for stage in (0, 1))
    count = parameter_count(gpt())
    assert state(predict_memory(whole)) == pytest.approx(18 * count, abs=4)
    assert state(predict_memory(sharded)) == pytest.approx((6 + 12 / 8) * count, abs=4)


@pytest.mark.parametrize(
    "spec", [gpt(), gpt(tie_embeddings=False, bias=False), llama(), llama(qk_norm=False, qkv_bias=True)]
)
def test_parameters_of_one_rank_are_those_of_the_model(spec: Any) -> None:
    found = elements_of(setting(spec), spec.num_layers, first=True, last=True)
    assert found.total == pytest.approx(parameter_count(spec), rel=1e-9)


def test_a_middle_stage_counts_where_it_needs_most() -> None:
    """First and last stage one block short, no table to speak of: the second keeps most alive of the full ones."""
    spec = gpt(layers=22, width=1024, vocab_size=512)
    piped = setting(
        spec, Layout(pp=8), accumulation=32, microbatch=4, first_layers=1, last_layers=1, software="zero-bubble"
    )
    memory = predict_memory(piped)
    assert memory.stage == 1
    assert candidates(piped, (2, 3, 3, 3, 3, 3, 3, 2)) == (0, 1, 7)


def test_the_heaviest_stage_counts_and_not_the_average() -> None:
    """An average over the stages would be a third too low (Megatron-Bridge PR 5077 found 31.8% on its own model)."""
    piped = setting(gpt(layers=16, width=2048), Layout(pp=8), accumulation=32, fused_attention=True)
    whole = predict_memory(setting(gpt(layers=16, width=2048), Layout(), fused_attention=True))
    memory = predict_memory(piped)
    assert state(memory) > 1.25 * state(whole) / 8
    assert memory.device_bytes == max(stage.device_bytes for stage in memory.stages)


def test_a_large_vocabulary_makes_the_loss_the_peak_and_chunks_take_it_away() -> None:
    whole = setting(
        llama(layers=4), sequence_length=8192, microbatch=2, fused_attention=True, software="torchtitan-2024"
    )
    chunked = msgspec.structs.replace(whole, loss_chunk_tokens=512)
    before, after = predict_memory(whole), predict_memory(chunked)
    assert before.stages[0].peak == "loss"
    assert before.parts["logits"] == 12 * 16384 * 128256
    assert before.allocated_bytes - after.allocated_bytes > 15e9


def test_the_three_memories_are_in_order_and_their_parts_add_up() -> None:
    memory = predict_memory(setting(llama(layers=8), Layout(dp_shard=8), zero_stage=3, software="torchtitan-2024",
                                    fused_attention=True, sequence_length=8192))  # fmt: skip
    assert memory.allocated_bytes < memory.reserved_bytes < memory.device_bytes
    assert memory.device_p10_bytes < memory.device_bytes < memory.device_p90_bytes
    assert sum(memory.parts.values()) == pytest.approx(memory.device_bytes, abs=20)


def test_more_shards_free_state_and_nothing_else() -> None:
    """8.03e9 parameters of 16 bytes over 8 and over 128 ranks: 14.0 GiB by the table, whatever the activations."""
    few, many = (
        predict_memory(
            setting(
                llama(),
                Layout(dp_shard=n),
                zero_stage=3,
                software="torchtitan-2024",
                fused_attention=True,
                sequence_length=8192,
                microbatch=2,
                recompute="selective",
                recomputed="every other product",
            )
        )
        for n in (8, 128)
    )
    freed = 16 * parameter_count(llama()) * (1 / 8 - 1 / 128)
    assert state(few) - state(many) == pytest.approx(freed if few.parts["gradients"] else freed * 12 / 16, rel=1e-3)
    assert few.reserved_bytes - many.reserved_bytes == pytest.approx(1.06 * freed, rel=1e-3)


def test_the_chance_to_run_out_grows_with_what_is_needed() -> None:
    chances = [oom_probability(needed, 80e9, 0.1) for needed in (60e9, 72e9, 80e9, 90e9)]
    assert chances == sorted(chances)
    assert chances[2] == pytest.approx(0.5)
    assert oom_probability(80e9 * 1.1, 80e9, 0.0953 / 1.2816) == pytest.approx(0.9, abs=0.01)


def test_a_model_that_needs_more_than_the_device_has_does_not_fit() -> None:
    assert not fits(
        predict_memory(setting(llama(), software="megatron-2023", fused_attention=True, sequence_length=8192))
    )


def test_stages_that_do_not_hold_the_model_are_refused() -> None:
    with pytest.raises(ValueError, match="8 blocks do not fill stages"):
        predict_memory(setting(gpt(layers=8), Layout(pp=2), layers=(3, 3)))

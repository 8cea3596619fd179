"""Transforms in a resolved job: their order, their memory, and what is refused before any process starts."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from paceline.errors import JobError
from paceline.job.load import load_job
from paceline.job.resolve import Resolved, resolve_job
from paceline.model.flop import activation_bytes
from paceline.model.spec import parameter_count
from paceline.parallel.offload.cost import CHUNK_ELEMENTS
from tests.conformance.cases import HOST

GPU = replace(HOST, device_kind="cuda", devices=8, device_name="gpu", device_memory_bytes=80 * 2**30, compiler="g++")
BASE = ["model.preset=llama3.2-1b", "batch.global_batch=8", "batch.microbatch=1", "data.sequence_length=4096",
        "parallel.precision=bf16", "parallel.compile=false"]  # fmt: skip


def resolved(*words: str, ranks: int = 8) -> Resolved:
    return resolve_job(load_job(None, [*BASE, *words]), ranks, GPU)


def derivation(job: Resolved, key: str) -> str:
    return next(str(d) for d in job.derivations if d.key == key)


def test_the_order_is_printed() -> None:
    words = (
        "parallel.recompute=full",
        "parallel.offload=host",
        "parallel.compile=true",
        "parallel.parameter_dtype=bf16",
    )
    assert "weights in bf16 -> recompute full -> compile -> ddp -> offload to host" in derivation(
        resolved(*words), "transforms"
    )
    assert derivation(resolved(), "transforms").startswith("transforms = ddp ")


def test_recomputation_leaves_block_inputs() -> None:
    none, selective, full = (resolved(f"parallel.recompute={r}").memory for r in ("none", "selective", "full"))
    assert full.activations_bytes < selective.activations_bytes < none.activations_bytes
    spec = resolved().spec
    saved = activation_bytes(spec, 1, 4096, 2)
    assert full.activations_bytes < none.activations_bytes - (spec.num_layers - 1) * (
        saved.per_layer - saved.block_input
    )
    assert "% more matrix products" in derivation(resolved("parallel.recompute=full"), "parallel.recompute")


def test_bf16_weights_weigh_18_bytes() -> None:
    job = resolved("parallel.parameter_dtype=bf16", "parallel.offload=none")
    memory, count = job.memory, parameter_count(job.spec)
    assert (memory.parameters_bytes, memory.master_bytes, memory.gradients_bytes) == (2 * count, 4 * count, 4 * count)


def test_offloaded_moments_leave_a_chunk() -> None:
    memory = resolved("parallel.offload=host").memory
    assert 8 * CHUNK_ELEMENTS <= memory.moments_bytes < 8 * CHUNK_ELEMENTS + 10_000
    assert resolved().memory.moments_bytes > 50 * memory.moments_bytes


def test_chunks_replace_whole_logits() -> None:
    whole, chunked = resolved("parallel.loss_chunk_tokens=0"), resolved("parallel.loss_chunk_tokens=512")
    vocabulary = whole.spec.vocab_size
    assert whole.memory.logits_bytes == pytest.approx(2 * 4096 * vocabulary * 2, rel=0.01)
    assert chunked.memory.logits_bytes == vocabulary * (4 * whole.spec.dim + 512 * 6)
    assert resolved().transforms.loss_chunk_tokens > 0  # 2 GiB of fp32 logits: chunked unless asked otherwise


@pytest.mark.parametrize(
    ("words", "key", "reason"),
    [
        (["parallel.loss_chunk_tokens=4096"], "parallel.loss_chunk_tokens", "no effect"),
        (["parallel.parameter_dtype=bf16", "parallel.precision=fp32"], "parallel.parameter_dtype", "bf16 arithmetic"),
        (["parallel.parameter_dtype=bf16", "parallel.dp_shard=8"], "parallel.parameter_dtype", "no effect"),
        (["parallel.offload_dir=/data"], "parallel.offload_dir", "no effect with offload = none"),
        (["parallel.offload=host", "optimizer.name=sgd"], "parallel.offload", "sgd has none"),
    ],
)
def test_contradictions_are_refused(words: list[str], key: str, reason: str) -> None:
    with pytest.raises(JobError, match=reason) as caught:
        resolved(*words)
    assert caught.value.key == key and caught.value.hint


def test_host_and_fp16_are_refused_where_the_processor_gains_nothing() -> None:
    job = load_job(None, ["parallel.offload=host"])
    with pytest.raises(JobError, match="ranks run on the processor"):
        resolve_job(job, 1, HOST)
    with pytest.raises(JobError, match="no fp16 arithmetic"):
        resolve_job(load_job(None, ["parallel.precision=fp16"]), 1, replace(HOST, fp16=False))

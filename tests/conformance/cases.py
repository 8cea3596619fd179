"""The layouts that every strategy is held to. A new strategy adds its own to `CASES`; the suite needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.cluster.probe import Host
from paceline.job.load import load_job
from paceline.job.resolve import Resolved, resolve_job, resolved_cost
from paceline.parallel.strategy import Cost

HOST = Host("test", "cpu", 0, "cpu", 2**34, 4, 2**34, True, None)
GLOBAL_BATCH = 12
LENGTH = 16
VOCABULARY = 64
MODEL = [
    "model.num_layers=2", "model.dim=32", "model.num_heads=4", "model.num_kv_heads=2", "model.ffn_dim=48",
    f"model.vocab_size={VOCABULARY}", "model.max_sequence_length=64", "model.tie_embeddings=false",
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A layout on a number of ranks, as overrides of the suite's job; with `documents` packed into its sequences."""

    name: str
    world_size: int
    overrides: tuple[str, ...] = ()
    documents: bool = False

    def splits(self, *axes: str) -> bool:
        """Whether the layout has ranks along any of these axes."""
        return any(o.startswith(tuple(f"parallel.{axis}=" for axis in axes)) for o in self.overrides)


def _fsdp(ranks: int, stage: int) -> tuple[str, ...]:
    return (f"parallel.dp_shard={ranks}", f"parallel.zero_stage={stage}")


CASES = [
    Case("ddp-2", 2),
    Case("ddp-3", 3),
    Case("ddp-4", 4),
    Case("ddp-2 accumulating", 2, ("batch.microbatch=2",)),
    Case("ddp-3 in small buckets", 3, ('parallel.bucket_bytes="4KiB"', "batch.microbatch=2")),
    Case("ddp-2 after the backward", 2, ("parallel.overlap=false", 'parallel.bucket_bytes="8KiB"')),
    Case("ddp-4 tied, qk norm, biases", 4, ("model.tie_embeddings=true", "model.qk_norm=true", "model.qkv_bias=true")),
    *(Case(f"fsdp-{ranks} stage {stage}", ranks, _fsdp(ranks, stage)) for ranks, stage in ((2, 3), (3, 2), (4, 1))),
    *(
        Case(
            f"fsdp-{ranks} stage {stage} accumulating, reducing every {every}",
            ranks,
            (*_fsdp(ranks, stage), "batch.microbatch=2", f"parallel.reduce_every={every}"),
        )
        for ranks, stage, every in (
            (2, 3, "step"),
            (3, 3, "microbatch"),
            (2, 2, "step"),
            (3, 2, "microbatch"),
            (3, 1, "step"),
            (2, 1, "microbatch"),
        )
    ),
    Case("hsdp-2x2 stage 3", 4, ("parallel.dp_replicate=2", "parallel.dp_shard=2")),
    Case(
        "hsdp-2x2 stage 2 accumulating",
        4,
        ("parallel.dp_replicate=2", "parallel.dp_shard=2", "parallel.zero_stage=2", "batch.microbatch=1"),
    ),
    Case(
        "hsdp-2x2 stage 1 accumulating",
        4,
        ("parallel.dp_replicate=2", "parallel.dp_shard=2", "parallel.zero_stage=1", "batch.microbatch=1"),
    ),
    Case(
        "fsdp-4 stage 3 tied, qk norm, biases",
        4,
        (*_fsdp(4, 3), "model.tie_embeddings=true", "model.qk_norm=true", "model.qkv_bias=true"),
    ),
]


CONTEXT = [
    Case("cp-2", 2, ("parallel.cp=2",)),
    Case("cp-3, documents", 3, ("parallel.cp=3", "data.sequence_length=24"), documents=True),
    Case("cp-4 accumulating, learned positions", 4,
         ("parallel.cp=4", "batch.microbatch=2", "model.positions=learned")),
    Case("cp-4 with dropout, documents", 4,
         ("parallel.cp=4", "model.dropout=0.2", "model.attention_dropout=0.3"), documents=True),
    Case("cp-2 by all-to-all, with dropout, documents", 2,
         ("parallel.cp=2", "parallel.cp_method=alltoall", "model.attention_dropout=0.3"), documents=True),
    Case("cp-4 by all-to-all, heads repeated", 4, ("parallel.cp=4", "parallel.cp_method=alltoall")),
    Case("cp-2 dp-2, recomputing", 4, ("parallel.cp=2", "parallel.recompute=full", "batch.microbatch=3")),
    Case("cp-2 dp-2 by all-to-all, recomputing", 4,
         ("parallel.cp=2", "parallel.cp_method=alltoall", "parallel.recompute=selective")),
    Case("cp-2 fsdp-2 stage 3", 4, ("parallel.cp=2", *_fsdp(2, 3)), documents=True),
    Case("cp-2 fsdp-2 stage 1 accumulating", 4, ("parallel.cp=2", *_fsdp(2, 1), "batch.microbatch=2")),
    Case("cp-2 tp-2", 4, ("parallel.cp=2", "parallel.tp=2"), documents=True),
    Case("cp-2 tp-2 by all-to-all", 4, ("parallel.cp=2", "parallel.tp=2", "parallel.cp_method=alltoall")),
    Case("dp-2 cp-2 tp-2", 8, ("parallel.cp=2", "parallel.tp=2", "model.dropout=0.1")),
]  # fmt: skip
CASES += CONTEXT


def _pp(ranks: int, layers: int, schedule: str = "1f1b", microbatch: int = 2) -> tuple[str, ...]:
    return (f"parallel.pp={ranks}", f"parallel.pp_schedule={schedule}", f"model.num_layers={layers}",
            f"batch.microbatch={microbatch}")  # fmt: skip


PIPELINE = [
    Case("pp-2 1f1b", 2, _pp(2, 3), documents=True),
    Case("pp-4 1f1b tied, learned positions", 4,
         (*_pp(4, 5), "model.tie_embeddings=true", "model.positions=learned")),
    Case("pp-2 gpipe, one micro-batch", 2, _pp(2, 2, "gpipe", 12)),
    Case("pp-4 gpipe, chunked loss", 4, (*_pp(4, 4, "gpipe", 4), "parallel.loss_chunk_tokens=16")),
    Case("pp-2 interleaved, tied", 2, (*_pp(2, 4, "interleaved-1f1b", 3), "model.tie_embeddings=true")),
    Case("pp-4 interleaved", 4, _pp(4, 8, "interleaved-1f1b", 3)),
    Case("pp-2 zero-bubble, chunked loss, qk norm, dropout", 2,
         (*_pp(2, 3, "zero-bubble", 3), "parallel.loss_chunk_tokens=8", "model.qk_norm=true", "model.dropout=0.2"),
         documents=True),
    Case("pp-4 zero-bubble tied", 4, (*_pp(4, 4, "zero-bubble", 3), "model.tie_embeddings=true")),
    Case("pp-2 zero-bubble of 2 stages", 2, (*_pp(2, 4, "zero-bubble", 3), "parallel.pp_stages_per_rank=2")),
    Case("pp-2 zero-bubble, layer norm, biases", 2,
         (*_pp(2, 2, "zero-bubble", 3), "model.norm=layernorm", "model.mlp=gelu", "model.bias=true")),
    Case("pp-2 zbv tied", 2, (*_pp(2, 4, "zbv", 3), "model.tie_embeddings=true")),
    Case("pp-4 zbv", 4, _pp(4, 8, "zbv", 2)),
    Case("pp-2 dp-2 zero-bubble", 4, _pp(2, 2, "zero-bubble")),
    Case("pp-2 dp-2 recomputing", 4, (*_pp(2, 2, "1f1b", 3), "parallel.recompute=full")),
    Case("pp-2 fsdp-2 tied", 4, (*_pp(2, 3), "parallel.dp_shard=2", "model.tie_embeddings=true")),
    Case("pp-2 fsdp-2 interleaved", 4, (*_pp(2, 4, "interleaved-1f1b"), "parallel.dp_shard=2")),
    Case("pp-2 fsdp-2 zero-bubble", 4, (*_pp(2, 3, "zero-bubble"), "parallel.dp_shard=2")),
    Case("pp-2 fsdp-2 zero-bubble of 4 stages", 4,
         (*_pp(2, 8, "zero-bubble", 3), "parallel.pp_stages_per_rank=4", "parallel.dp_shard=2")),
    Case("pp-2 tp-2 zero-bubble", 4, (*_pp(2, 2, "zero-bubble", 4), "parallel.tp=2")),
    Case("pp-2 tp-2 tied, recomputing some", 4,
         (*_pp(2, 2, "1f1b", 3), "parallel.tp=2", "model.tie_embeddings=true", "model.qk_norm=true",
          "parallel.recompute=selective")),
    Case("pp-2 cp-2 zero-bubble", 4, (*_pp(2, 2, "zero-bubble", 3), "parallel.cp=2"), documents=True),
    Case("pp-2 fsdp-2 tp-2", 8, (*_pp(2, 2), "parallel.dp_shard=2", "parallel.tp=2",
         "model.tie_embeddings=true")),
]  # fmt: skip
CASES += PIPELINE

DROPOUT = ("model.dropout=0.2", "model.attention_dropout=0.3")
TENSOR = [
    Case("tp-2", 2, ("parallel.tp=2",), documents=True),
    Case("tp-3, uneven vocabulary", 3,
         ("parallel.tp=3", "model.num_heads=6", "model.num_kv_heads=3", "model.head_dim=8", *DROPOUT)),
    Case("tp-4, shared key and value heads, tied, qk norm, biases", 4,
         ("parallel.tp=4", "model.tie_embeddings=true", "model.qk_norm=true", "model.qkv_bias=true", *DROPOUT)),
    Case("tp-4, all positions on each rank", 4,
         ("parallel.tp=4", "parallel.sequence_parallel=false", "model.qk_norm=true", *DROPOUT)),
    Case("tp-2, layer norm, biases, recomputing", 2,
         ("parallel.tp=2", "model.norm=layernorm", "model.mlp=gelu", "model.bias=true", "parallel.recompute=full")),
    Case("tp-2, layer norm, biases, all positions on each rank", 2,
         ("parallel.tp=2", "model.norm=layernorm", "model.mlp=gelu", "model.bias=true",
          "parallel.sequence_parallel=false")),
    Case("tp-2, learned positions, recomputing some", 2,
         ("parallel.tp=2", "model.positions=learned", "parallel.recompute=selective", *DROPOUT)),
    Case("tp-2, chunked loss, accumulating", 2, ("parallel.tp=2", "batch.microbatch=4", "parallel.loss_chunk_tokens=24")),
    Case("dp-2 tp-2 accumulating", 4, ("parallel.tp=2", "batch.microbatch=2")),
    Case("fsdp-2 stage 3, tp-2 accumulating", 4, ("parallel.tp=2", *_fsdp(2, 3), "batch.microbatch=2")),
    Case("fsdp-2 stage 1, tp-2 accumulating, tied", 4,
         ("parallel.tp=2", *_fsdp(2, 1), "batch.microbatch=2", "model.tie_embeddings=true")),
    Case("fsdp-3 stage 2, tp-2", 6, ("parallel.tp=2", *_fsdp(3, 2))),
    Case("hsdp-2x2, tp-2", 8, ("parallel.tp=2", "parallel.dp_replicate=2", "parallel.dp_shard=2", *DROPOUT)),
]  # fmt: skip
CASES += TENSOR


def resolve_case(case: Case, extra: Sequence[str] = ()) -> Resolved:
    """The suite's job under a case."""
    words = [
        *MODEL, f"batch.global_batch={GLOBAL_BATCH}", f"data.sequence_length={LENGTH}", "parallel.precision=fp64",
        "parallel.compile=false", "optimizer.clip_norm=0.5", *case.overrides, *extra,
    ]  # fmt: skip
    return resolve_job(load_job(None, words), case.world_size, HOST)


def stated_cost(case: Case, extra: Sequence[str] = (), rank: int = 0) -> Cost:
    """What the case's strategies say about themselves."""
    return resolved_cost(resolve_case(case, extra), rank)

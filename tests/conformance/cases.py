"""What every strategy is held to: the layouts of the suite, and a training run under one of them on this rank.

A new strategy adds its layouts to `CASES`; the suite needs nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.cluster.probe import Host
from paceline.job.load import load_job
from paceline.job.resolve import Resolved, resolve_job, resolved_cost
from paceline.optim.optimizer import build_optimizer
from paceline.parallel.apply import Applied
from paceline.parallel.context.apply import batch_part
from paceline.parallel.fsdp.apply import ShardedReducer, held_bytes
from paceline.parallel.layout import AXES, Layout, axes_name
from paceline.parallel.mesh import Mesh, build_mesh
from paceline.parallel.precision.apply import autocast_of, loss_scale_of
from paceline.parallel.strategy import Cost
from paceline.parallel.tensor.apply import vocabulary_part
from paceline.train.language import language_functions
from paceline.train.startup import build_model
from paceline.train.step import TrainStep

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


@dataclass
class Counted:
    """What one step sent, and what was kept after it; `window_bytes` between two micro-batches of a sharded model."""

    calls: dict[str, int]
    call_bytes: dict[str, int]
    state_bytes: dict[str, int]
    window_bytes: dict[str, int]


@dataclass
class Trained:
    """What a run left on one rank; `counted` by step, from 1."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    counted: dict[int, Counted] = field(default_factory=dict)


class Run(NamedTuple):
    """An optimizer, as overrides, and how many steps it takes."""

    words: tuple[str, ...]
    steps: int


def resolve_case(case: Case, extra: Sequence[str] = ()) -> Resolved:
    """The suite's job under a case."""
    words = [
        *MODEL, f"batch.global_batch={GLOBAL_BATCH}", f"data.sequence_length={LENGTH}", "parallel.precision=fp64",
        "parallel.compile=false", "optimizer.clip_norm=0.5", *case.overrides, *extra,
    ]  # fmt: skip
    return resolve_job(load_job(None, words), case.world_size, HOST)


def made(
    rank: int, world_size: int, case: Case, extra: Sequence[str] = (), mesh: Mesh | None = None
) -> tuple[Resolved, nn.Module, Applied, TrainStep]:
    """The case's model under its strategies, and its step."""
    resolved = resolve_case(case, extra)
    device = torch.device("cpu")
    group = dist.group.WORLD if world_size > 1 else None
    mesh = mesh or build_mesh(resolved.layout, device)
    model, applied = build_model(resolved, mesh, device)
    forward, loss = language_functions(
        resolved.spec,
        0,
        chunk_tokens=resolved.transforms.loss_chunk_tokens,
        part=vocabulary_part(resolved.spec, mesh),
        split_backward=resolved.pipeline.splits_backward,
    )
    optimizer = build_optimizer(resolved.job.optimizer, applied.parameters)
    step = TrainStep(
        model, forward, loss, optimizer, applied.reducer, group=group, prescale=1 / resolved.tokens_per_step,
        clip_norm=resolved.job.optimizer.clip_norm, device=device, autocast=autocast_of(resolved.precision, device),
        counts=resolved.layout.counts_loss(rank), stages=applied.stages, loss_scale=loss_scale_of(resolved.precision),
    )  # fmt: skip
    return resolved, model, applied, step


def train(
    rank: int,
    world_size: int,
    case: Case,
    steps: int,
    extra: Sequence[str] = (),
    counted: Sequence[int] = (),
    mesh: Mesh | None = None,
) -> Trained:
    """Train the case on this rank's share of a fixed stream of tokens.

    Args:
        steps: how many.
        extra: overrides beside the case's.
        counted: steps, from 1, in which collectives and what is kept are counted.
        mesh: of the case's layout where it is there already.
    """
    resolved, model, applied, step = made(rank, world_size, case, extra, mesh)
    optimizer = step.optimizer
    trained = Trained([], [], {}, {})
    for at in range(steps):
        counts, marks = at + 1 in counted, _Marks(step.reducer)
        counter = CollectiveCounter(resolved.layout)
        with counter if counts else nullcontext():
            result = step(share(at, rank, resolved, case.documents), 1e-2, marks if counts else _unmarked)
        trained.losses.append(result.loss)
        trained.norms.append(result.grad_norm)
        if counts:
            kept = _state_bytes(model, applied, optimizer)
            trained.counted[at + 1] = Counted(dict(counter.calls), dict(counter.sizes), kept, marks.held)
    trained.weights = {n: t.clone() for n, t in applied.whole_weights()}
    with torch.no_grad():
        for _, parameter in applied.parameters:
            if parameter.grad is not None:
                parameter.copy_(parameter.grad)
    trained.gradients = {n: t.clone() for n, t in applied.whole_weights()}
    return trained


def train_each(rank: int, world_size: int, case: Case, runs: Sequence[Run], counted: Sequence[int]) -> list[Trained]:
    """The case under each optimizer; the layout's groups are made once."""
    mesh = build_mesh(resolve_case(case).layout, torch.device("cpu"))
    return [train(rank, world_size, case, run.steps, run.words, counted, mesh) for run in runs]


def train_alone(rank: int, world_size: int, case: Case, runs: Sequence[Sequence[Run]]) -> dict[Run, Trained]:
    """One process's runs, those of rank 0 and of rank 1 beside each other. The ranks have no group."""
    return {run: train(0, 1, case, run.steps, run.words) for run in runs[rank]}


def _state_bytes(model: nn.Module, applied: Applied, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """What is kept, by kind, and what is stored."""
    gradients, buffers = applied.reducer.state_bytes()
    handles = [p for _, p in applied.parameters]
    return {
        "parameters": sum(p.numel() * p.element_size() for p in handles),
        "gradients": gradients,
        "buffers": buffers,
        "moments": sum(t.numel() * t.element_size() for s in optimizer.state.values() for t in s.values()),
        "stored_parameters": _distinct_bytes(handles),
        "stored_gradients": _distinct_bytes(p.grad for p in handles if p.grad is not None),
        "stored_shown": _distinct_bytes(_stored(p) for p in model.parameters()),
    }


def _unmarked(part: str) -> None:
    """Of a step that is not counted."""


def stated_cost(case: Case, extra: Sequence[str] = (), rank: int = 0) -> Cost:
    """What the case's strategies say about themselves."""
    return resolved_cost(resolve_case(case, extra), rank)


class _Marks:
    """Measures what a sharded model holds after each backward pass but the last: between two micro-batches."""

    def __init__(self, reducer: Any) -> None:
        self.held: dict[str, int] = {}
        self._reducer = getattr(reducer, "data", reducer)
        self._now: dict[str, int] = {}

    def __call__(self, part: str) -> None:
        if not isinstance(self._reducer, ShardedReducer):
            return
        if part == "forward":
            return
        if part == "backward":
            if self._now:
                self.held = self._now
            held = held_bytes(self._reducer.model)
            self._now = {"gathered": held.gathered, "gradients": held.gradients, "buffers": held.padding,
                         "parameters": held.parameters}  # fmt: skip


class CollectiveCounter(TorchDispatchMode):
    """Counts collectives by kind, with the bytes of their tensors, below everything that the product does."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.layout = layout
        self.calls: Counter[str] = Counter()
        self.sizes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            kind = KINDS[func._schema.name.removeprefix("c10d::")]
            ranks = dist.get_process_group_ranks(_group_of(args))
            key = f"{kind} over {_axis_of(ranks, self.layout)}"
            self.calls[key] += 1
            # The whole tensor: an all-gather's output, a reduce-scatter's input.
            self.sizes[key] += max(t.numel() * t.element_size() for t in _tensors(args))
        return func(*args, **(kwargs or {}))


KINDS = {
    "allreduce_": "all_reduce", "_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter",
    "alltoall_base_": "all_to_all", "send": "send_recv", "recv_": "send_recv",
}  # fmt: skip


def by_kind_and_axis(cost: Cost) -> tuple[dict[str, int], dict[str, int]]:
    """Calls and bytes of a statement, keyed as `CollectiveCounter` does."""
    calls: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for c in cost.collectives:
        calls[f"{c.kind} over {c.axis}"] += c.count
        sizes[f"{c.kind} over {c.axis}"] += c.size_bytes
    return dict(calls), dict(sizes)


def _group_of(args: Any) -> Any:
    boxed = next(a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type()))
    return dist.ProcessGroup.unbox(boxed)


def _axis_of(ranks: list[int], layout: Layout) -> str:
    """The axes along which these ranks differ."""
    places = [layout.coordinates(rank) for rank in ranks]
    return axes_name(layout, tuple(axis for axis in AXES if len({place[axis] for place in places}) > 1))


def _stored(parameter: Tensor) -> Tensor:
    local: Tensor = getattr(parameter, "_local_tensor", parameter)
    return local


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [t for v in value for t in _tensors(v)]
    return []


def _distinct_bytes(tensors: Any) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def share(step: int, rank: int, resolved: Resolved, documents: bool) -> list[dict[str, Any]]:
    """This rank's micro-batches of the global batch of `step`; a third of the labels is masked, unevenly by sample."""
    generator = torch.Generator().manual_seed(1000 + step)
    length = resolved.job.data.sequence_length
    tokens = torch.randint(0, VOCABULARY, (GLOBAL_BATCH, length + 1), generator=generator)
    keep = torch.rand(GLOBAL_BATCH, length, generator=generator) < torch.linspace(0.3, 1.0, GLOBAL_BATCH)[:, None]
    labels = tokens[:, 1:].where(keep, torch.tensor(-100))
    per_rank, size = resolved.batch.per_rank, resolved.batch.microbatch
    first = resolved.layout.data_rank(rank) * per_rank
    part_of = batch_part(resolved.layout, rank)
    batches = []
    for begin in range(first, first + per_rank, size):
        own = slice(begin, begin + size)
        batch = {"tokens": tokens[own, :-1].contiguous(), "labels": labels[own].contiguous(), "step": step,
                 "sample_ids": torch.arange(begin, begin + size)}  # fmt: skip
        batches.append(part_of({**batch, **(_documents(begin, size, length) if documents else {})}))
    return batches


def _documents(first: int, count: int, length: int) -> dict[str, Tensor]:
    """Borders inside each sequence, others in each: documents within a chunk, across chunks and across ranks."""
    inside = [n * length + (3 + first + n) % length for n in range(count)] + [
        n * length + length // 2 for n in range(count)
    ]
    borders = sorted({*(n * length for n in range(count + 1)), *inside})
    return {"cumulative": torch.tensor(borders, dtype=torch.int32), "max_length": torch.tensor(length)}

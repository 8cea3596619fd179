"""What every strategy is held to: the layouts of the suite, and a training run under one of them on this rank.

A new strategy adds its layouts to `CASES`; the suite needs nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.cluster.probe import Host
from paceline.job.load import load_job
from paceline.job.resolve import Resolved, resolve_job, resolved_cost
from paceline.optim.optimizer import build_optimizer
from paceline.parallel.fsdp.apply import ShardedReducer, held_bytes
from paceline.parallel.layout import AXES, Layout, axes_name
from paceline.parallel.mesh import build_mesh
from paceline.parallel.precision.apply import autocast_of
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
    f"model.vocab_size={VOCABULARY}", "model.max_sequence_length=64",
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A layout on a number of ranks, as overrides of the suite's job."""

    name: str
    world_size: int
    overrides: tuple[str, ...] = ()


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


@dataclass
class Trained:
    """What a run left on one rank."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    state_bytes: dict[str, int] = field(default_factory=dict)
    window_bytes: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    call_bytes: dict[str, int] = field(default_factory=dict)


def resolve_case(case: Case, extra: Sequence[str] = ()) -> Resolved:
    """The suite's job under a case."""
    words = [
        *MODEL, f"batch.global_batch={GLOBAL_BATCH}", f"data.sequence_length={LENGTH}", "parallel.precision=fp64",
        "parallel.compile=false", "optimizer.clip_norm=0.5", *case.overrides, *extra,
    ]  # fmt: skip
    return resolve_job(load_job(None, words), case.world_size, HOST)


def train(rank: int, world_size: int, case: Case, steps: int, extra: Sequence[str] = ()) -> Trained:
    """Train the case on this rank's share of a fixed stream of tokens; collectives are counted in the last step."""
    resolved = resolve_case(case, extra)
    device = torch.device("cpu")
    group = dist.group.WORLD if world_size > 1 else None
    mesh = build_mesh(resolved.layout, device)
    model, applied = build_model(resolved, mesh, device)
    forward, loss = language_functions(
        resolved.spec, 0, chunk_tokens=resolved.transforms.loss_chunk_tokens, part=vocabulary_part(resolved.spec, mesh)
    )
    reducer = applied.reducer
    optimizer = build_optimizer(resolved.job.optimizer, applied.parameters)
    step = TrainStep(
        model, forward, loss, optimizer, reducer, group=group, prescale=1 / (GLOBAL_BATCH * LENGTH),
        clip_norm=resolved.job.optimizer.clip_norm, device=device, autocast=autocast_of(resolved.precision, device),
        counts=resolved.layout.counts_loss(rank),
    )  # fmt: skip
    trained = Trained([], [], {}, {})
    for at in range(steps):
        counter = CollectiveCounter(resolved.layout)
        marks = _Marks(reducer)
        with counter if at == steps - 1 else nullcontext():
            result = step(_share(at, rank, resolved), 1e-2, marks)
        trained.losses.append(result.loss)
        trained.norms.append(result.grad_norm)
        trained.calls, trained.call_bytes = dict(counter.calls), dict(counter.sizes)
    gradients, buffers = reducer.state_bytes()
    handles = [p for _, p in applied.parameters]
    trained.state_bytes = {
        "parameters": sum(p.numel() * p.element_size() for p in handles),
        "gradients": gradients,
        "buffers": buffers,
        "moments": sum(t.numel() * t.element_size() for s in optimizer.state.values() for t in s.values()),
        "stored_parameters": _distinct_bytes(handles),
        "stored_gradients": _distinct_bytes(p.grad for p in handles if p.grad is not None),
        "stored_shown": _distinct_bytes(_stored(p) for p in model.parameters()),
    }
    trained.window_bytes = marks.held
    trained.weights = {n: t.clone() for n, t in applied.whole_weights()}
    with torch.no_grad():
        for _, parameter in applied.parameters:
            if parameter.grad is not None:
                parameter.copy_(parameter.grad)
    trained.gradients = {n: t.clone() for n, t in applied.whole_weights()}
    return trained


def stated_cost(case: Case, extra: Sequence[str] = (), rank: int = 0) -> Cost:
    """What the case's strategies say about themselves."""
    return resolved_cost(resolve_case(case, extra), rank)


class _Marks:
    """Measures what a sharded model holds after each backward pass but the last: between two micro-batches."""

    def __init__(self, reducer: Any) -> None:
        self.held: dict[str, int] = {}
        self._reducer = reducer
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


KINDS = {"allreduce_": "all_reduce", "_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter"}


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


def _share(step: int, rank: int, resolved: Resolved) -> list[dict[str, Tensor]]:
    """This rank's micro-batches of the global batch of `step`; a third of the labels is masked, unevenly by sample."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, VOCABULARY, (GLOBAL_BATCH, LENGTH + 1), generator=generator)
    keep = torch.rand(GLOBAL_BATCH, LENGTH, generator=generator) < torch.linspace(0.3, 1.0, GLOBAL_BATCH)[:, None]
    labels = tokens[:, 1:].where(keep, torch.tensor(-100))
    per_rank = resolved.batch.per_rank
    data_rank = resolved.layout.data_rank(rank)
    own = slice(data_rank * per_rank, (data_rank + 1) * per_rank)
    size = resolved.batch.microbatch
    return [
        {"tokens": t.contiguous(), "labels": y.contiguous()}
        for t, y in zip(tokens[own, :-1].split(size), labels[own].split(size), strict=True)
    ]

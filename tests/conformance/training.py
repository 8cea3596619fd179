"""A training run under a case on this rank: what it comes to, what each step sent and what was kept."""

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

from paceline.job.resolve import Resolved
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
from tests.conformance.cases import GLOBAL_BATCH, VOCABULARY, Case, resolve_case


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

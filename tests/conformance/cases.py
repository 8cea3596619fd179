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
from paceline.job.resolve import Resolved, resolve_job
from paceline.optim.optimizer import build_optimizer
from paceline.parallel.precision.apply import autocast_of
from paceline.train.language import language_functions
from paceline.train.startup import build_model, make_reducer
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


CASES = [
    Case("ddp-2", 2),
    Case("ddp-3", 3),
    Case("ddp-4", 4),
    Case("ddp-2 accumulating", 2, ("batch.microbatch=2",)),
    Case("ddp-3 in small buckets", 3, ('parallel.bucket_bytes="4KiB"', "batch.microbatch=2")),
    Case("ddp-2 after the backward", 2, ("parallel.overlap=false", 'parallel.bucket_bytes="8KiB"')),
    Case("ddp-4 tied, qk norm, biases", 4, ("model.tie_embeddings=true", "model.qk_norm=true", "model.qkv_bias=true")),
]


@dataclass
class Trained:
    """What a run left on one rank."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    state_bytes: dict[str, int] = field(default_factory=dict)
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
    model = build_model(resolved, device)
    forward, loss = language_functions(resolved.spec, 0)
    reducer = make_reducer(model, group, resolved.ddp)
    optimizer = build_optimizer(resolved.job.optimizer, model.named_parameters())
    step = TrainStep(
        model, forward, loss, optimizer, reducer, group=group, prescale=1 / (GLOBAL_BATCH * LENGTH),
        clip_norm=resolved.job.optimizer.clip_norm, device=device, autocast=autocast_of(resolved.precision, device),
    )  # fmt: skip
    trained = Trained([], [], {}, {})
    for at in range(steps):
        counter = CollectiveCounter()
        with counter if at == steps - 1 else nullcontext():
            result = step(_share(at, rank, resolved), 1e-2)
        trained.losses.append(result.loss)
        trained.norms.append(result.grad_norm)
        trained.calls, trained.call_bytes = dict(counter.calls), dict(counter.sizes)
    trained.weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    trained.gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    gradients, buffers = reducer.state_bytes()
    trained.state_bytes = {
        "parameters": sum(p.numel() * p.element_size() for p in model.parameters()),
        "gradients": gradients,
        "buffers": buffers,
        "moments": sum(t.numel() * t.element_size() for s in optimizer.state.values() for t in s.values()),
        "held_gradients": _distinct_bytes(p.grad for p in model.parameters() if p.grad is not None),
    }
    return trained


class CollectiveCounter(TorchDispatchMode):
    """Counts collectives by kind, with the bytes of their tensors, below everything that the product does."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.sizes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            kind = func._schema.name.removeprefix("c10d::").rstrip("_").removeprefix("_")
            self.calls[kind] += 1
            self.sizes[kind] += sum(t.numel() * t.element_size() for t in _tensors(args))
        return func(*args, **(kwargs or {}))


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
    own = slice(rank * per_rank, (rank + 1) * per_rank)
    size = resolved.batch.microbatch
    return [
        {"tokens": t.contiguous(), "labels": y.contiguous()}
        for t, y in zip(tokens[own, :-1].split(size), labels[own].split(size), strict=True)
    ]

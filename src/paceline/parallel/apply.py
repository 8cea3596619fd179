"""From a layout to a model under its strategies: which one applies follows from the axes that split something."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.checkpoint.boxes import Placement
from paceline.parallel.ddp.apply import BucketReducer, LocalReducer
from paceline.parallel.ddp.config import DdpConfig
from paceline.parallel.fsdp.config import FsdpConfig
from paceline.parallel.layout import REPLICAS, SHARDS, TOKENS
from paceline.parallel.mesh import Mesh
from paceline.parallel.precision.master import MasterWeights
from paceline.parallel.reducer import Reducer
from paceline.parallel.registry import strategies
from paceline.parallel.split import ModelSplit, SplitReducer, WholeWeights

if TYPE_CHECKING:
    from paceline.parallel.pipeline.apply import Pipeline

Named = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True)
class Applied:
    """A model under its strategies.

    parameters: this rank's trainable and frozen tensors by name, plain, for the optimizer.
    reducer: sums gradients over the data ranks.
    in_step: whether a forward pass is a collective, so that all ranks must run the same number of them.
    placements: which box of each parameter this rank holds, by the names of `parameters`.
    whole_weights: every parameter whole, one at a time, by name in sorted order; all ranks iterate alike.
    settle: give back what forward passes without a backward left gathered.
    master: the fp32 weights behind a model's bf16 ones; `parameters` and `whole_weights` are these then.
    stages: runs the model's passes where it is cut into the stages of a pipeline.
    """

    parameters: list[tuple[str, nn.Parameter]]
    reducer: Reducer
    in_step: bool
    placements: Mapping[str, Placement]
    whole_weights: Callable[[], Iterator[tuple[str, Tensor]]]
    settle: Callable[[], None]
    master: MasterWeights | None = None
    stages: Pipeline | None = None


def apply_strategies(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    mesh: Mesh,
    *,
    ddp: DdpConfig,
    fsdp: FsdpConfig,
    device: torch.device,
    initial: Named | None = None,
    bf16_weights: bool = False,
    split: ModelSplit | None = None,
) -> Applied:
    """Put a model under the data strategies of a mesh's layout, in place.

    Args:
        model: on `device`; or on the meta device, and then it is given `initial`.
        blocks: its repeated parts, each of which a strategy may treat as a unit.
        mesh: of the layout.
        ddp, fsdp: settings of the strategies.
        device: where this rank computes.
        initial: name and whole value of each parameter, made one at a time.
        bf16_weights: replicas compute with bf16 weights; their fp32 masters are updated.
        split: how the model's own axes have cut it before; None where they have not.
    """
    if split is not None and initial is not None:
        initial = split.cut(initial)
    if "fsdp" in strategies(mesh.layout):
        applied, reduced, copies = _sharded(model, blocks, mesh, fsdp, device, initial)
    else:
        if initial is not None:
            place(model, initial, device)
        master = MasterWeights(model) if bf16_weights else None
        applied, reduced, copies = _replicated(model, mesh, ddp, master)
    return applied if split is None else _joined(applied, reduced, copies, split, device)


def place(model: nn.Module, initial: Named, device: torch.device) -> None:
    """Give a model its weights on `device`, one tensor at a time; a meta one is materialised in place."""
    owners = {f"{prefix}.{name}" if prefix else name: (module, name)
              for prefix, module in model.named_modules() for name, _ in module.named_parameters(recurse=False)}  # fmt: skip
    for full_name, value in initial:
        module, name = owners.pop(full_name)
        old = module.get_parameter(name)
        moved = value.to(device=device, dtype=old.dtype)
        module.register_parameter(name, nn.Parameter(moved, requires_grad=old.requires_grad))
    if owners:
        raise ValueError(f"no initial value for {sorted(owners)}")


def make_reducer(model: nn.Module, group: dist.ProcessGroup | None, config: DdpConfig) -> Reducer:
    """What sums gradients over replicas."""
    return LocalReducer(model.parameters()) if group is None else BucketReducer(model.parameters(), group, config)


_Under = tuple[Applied, Mapping[str, nn.Parameter], Mapping[str, int]]
"""A model under data strategies; what its reduced gradients are on; data ranks that hold the same part of each of them."""


def _sharded(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    mesh: Mesh,
    config: FsdpConfig,
    device: torch.device,
    initial: Named | None,
) -> _Under:
    # torch's sharding takes a second to load, which runs without it should not wait for.
    from paceline.parallel.fsdp.apply import ShardedReducer, shard_model, whole_tensors

    sharded = shard_model(model, blocks, mesh, config, device, initial)
    shards = mesh.group(*SHARDS)
    assert shards is not None
    handles = sharded.named_handles()
    applied = Applied(
        parameters=handles,
        reducer=ShardedReducer(sharded, mesh, config),
        in_step=True,
        placements=sharded.placements(dist.get_rank(shards), dist.get_world_size(shards)),
        whole_weights=lambda: whole_tensors(sharded, shards),
        settle=sharded.reshard,
    )
    whole = {name for name, _ in sharded.whole}
    copies = {name: mesh.degree(*TOKENS) if name in whole else mesh.degree("dp_replicate") for name, _ in handles}
    return applied, dict(handles), copies


def _replicated(model: nn.Module, mesh: Mesh, config: DdpConfig, master: MasterWeights | None) -> _Under:
    own = dict(model.named_parameters())
    named = {**own, **({} if master is None else dict(master.named))}
    applied = Applied(
        parameters=list(named.items()),
        reducer=make_reducer(model, mesh.group(*REPLICAS), config),
        in_step=False,
        placements={name: Placement.whole(p.shape) for name, p in named.items()},
        whole_weights=lambda: iter(sorted((n, p.detach()) for n, p in named.items())),
        settle=lambda: None,
        master=master,
    )
    return applied, own, dict.fromkeys(own, mesh.degree(*REPLICAS))


def _joined(
    applied: Applied,
    reduced: Mapping[str, nn.Parameter],
    copies: Mapping[str, int],
    split: ModelSplit,
    device: torch.device,
) -> Applied:
    """Parts of parts: placements in the whole tensors, sums and the norm over the model's axes too."""
    world = dist.group.WORLD
    assert world is not None
    placements = {name: part.within(split.placements[name]) for name, part in applied.placements.items()}
    all_copies = {name: count * split.copies.get(name, 1) for name, count in copies.items()}
    return replace(
        applied,
        reducer=SplitReducer(applied.reducer, reduced, split, all_copies, world=world, device=device),
        in_step=True,
        placements=placements,
        whole_weights=WholeWeights(dict(applied.parameters), placements, world, device),
    )

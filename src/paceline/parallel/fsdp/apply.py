"""Sharded data parallelism on torch's `fully_shard`: weights, gradients and moments in parts over `dp_shard`.

Each block is a unit that is gathered and reduced by itself, and the root holds the rest. The optimizer, the norm and the
saves see this rank's parts as plain tensors, through handles that are taken once: what the modules show in between
changes with whether a unit is gathered (then they are other parameters, without gradients).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from paceline.checkpoint.boxes import Placement
from paceline.optim.clip import gradient_norm
from paceline.parallel.collectives import all_gather
from paceline.parallel.ddp.apply import BucketReducer
from paceline.parallel.ddp.config import DdpConfig
from paceline.parallel.fsdp.config import FsdpConfig
from paceline.parallel.layout import SHARDS, TOKENS
from paceline.parallel.mesh import Mesh

GATHERED = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Part:
    """This rank's part of one parameter.

    name: in the model. shard: the parameter as `fully_shard` made it, whose gradient the reduction sets. handle: the same
    storage as a plain parameter, for the optimizer.
    """

    name: str
    shard: nn.Parameter
    handle: nn.Parameter

    @property
    def shape(self) -> torch.Size:
        """Of the whole tensor."""
        return self.shard.shape


@dataclass(frozen=True)
class ShardedModel:
    """A wrapped model: its units (the root last), its parts, and what every rank keeps whole."""

    units: list[FSDPModule]
    parts: list[Part]
    whole: list[tuple[str, nn.Parameter]]
    names: list[str]

    def named_handles(self) -> list[tuple[str, nn.Parameter]]:
        """Plain parameters by name, in the model's order."""
        handles = {**{part.name: part.handle for part in self.parts}, **dict(self.whole)}
        return [(name, handles[name]) for name in self.names]

    def placements(self, rank: int, degree: int) -> dict[str, Placement]:
        """What rank number `rank` of the shard axis holds of each parameter."""
        parts = {part.name: Placement.rows(part.shape, rank, degree) for part in self.parts}
        return parts | {name: Placement.whole(parameter.shape) for name, parameter in self.whole}

    def reshard(self) -> None:
        """Give back gathered weights, such as those that an evaluation left."""
        for unit in self.units:
            unit.reshard()


def shard_model(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    mesh: Mesh,
    config: FsdpConfig,
    device: torch.device,
    initial: Iterable[tuple[str, Tensor]] | None = None,
) -> ShardedModel:
    """Wrap a model in place, block by block.

    Args:
        model: with weights on `device`; or on the meta device, and then it is given `initial`.
        blocks: parts of it that are gathered one at a time.
        mesh: with `dp_shard`, and `dp_replicate` where there are replicas.
        config: the strategy's settings.
        device: where the parts live.
        initial: name and whole value of each parameter, taken one at a time; this rank's part is kept.
    """
    data_mesh = mesh.state_mesh()
    blocks = list(blocks)
    whole = _kept_whole(model, blocks)
    ignored = {parameter for _, parameter in whole}
    units: list[FSDPModule] = []
    for module in (*blocks, model):
        # The root is wanted again as soon as the forward pass ends.
        again = config.zero_stage == 3 and module is not model
        policy = _policy(config, module is not model)
        fully_shard(module, mesh=data_mesh, reshard_after_forward=again, mp_policy=policy, ignored_params=ignored)
        assert isinstance(module, FSDPModule)
        # Sums, on every unit: the weight of the whole batch divides once, in the step.
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
        module.set_reduce_scatter_unused_params(True, recurse=False)
        units.append(module)
    if initial is not None:
        _fill(model, initial, dist.get_rank(mesh.group(*SHARDS)), device)
    return _taken(model, units, {name for name, _ in whole})


def gather_whole(part: Part, group: dist.ProcessGroup) -> Tensor:
    """The whole tensor on every rank; all ranks of the shard group call it alike."""
    own = part.handle.detach()
    rows = -(-part.shape[0] // dist.get_world_size(group))
    padded = own.new_zeros(rows, *part.shape[1:])
    padded[: own.shape[0]] = own
    gathered = own.new_empty(rows * dist.get_world_size(group), *part.shape[1:])
    all_gather(gathered, padded, group)
    return gathered[: part.shape[0]]


class ShardedReducer:
    """Tells torch what each micro-batch of a window is, and hands the reduced parts of the gradient to the optimizer.

    Args:
        model: the wrapped model.
        mesh: that of the wrapping.
        config: that of the wrapping.
    """

    def __init__(self, model: ShardedModel, mesh: Mesh, config: FsdpConfig) -> None:
        self.model = model
        self._config = config
        self._replicas = mesh.layout.dp_replicate > 1
        group = mesh.group(*SHARDS)
        if group is None:
            raise ValueError("a mesh without dp_shard splits nothing")
        self._group = group
        self._trained = [part for part in model.parts if part.shard.requires_grad]
        trained_whole = [parameter for _, parameter in model.whole if parameter.requires_grad]
        self._rest = BucketReducer(trained_whole, mesh.group(*TOKENS), DdpConfig()) if trained_whole else None
        # A root without parameters is not there to be prefetched: the last block would be, a window too late.
        self._root_gathers = bool(_groups(model.units[-1]))

    def begin(self, *, last: bool, first: bool) -> None:
        """Before the forward pass of a micro-batch; `first` and `last` of its window."""
        if first:
            self.model.reshard()
            for part in self._trained:
                part.shard.grad = part.handle.grad = None
        reduces = last or self._config.reduce_every_microbatch
        for unit in self.model.units:
            unit.set_requires_gradient_sync(reduces, recurse=False)
            unit.set_reshard_after_backward(last or self._config.zero_stage > 1, recurse=False)
            if self._replicas:
                # Parts are summed in the type of the reduction until replicas meet; bf16 must not be summed for long.
                unit.set_requires_all_reduce(last or self._config.reduce_bf16, recurse=False)
        self.model.units[-1].set_is_last_backward(last or not self._root_gathers)
        if self._rest is not None:
            self._rest.begin(last=last, first=first)

    def finish(self) -> None:
        """Hand the parts of the summed gradient to the handles. Parameters that no rank used hold zeros."""
        if self._holds_whole_gradients():
            # The window's backward passes ran before `begin(last=True)`, as those of a pipeline do.
            self.model.units[-1]._get_fsdp_state()._root_post_backward_final_callback()
        if self._rest is not None:
            self._rest.finish()
        with torch.no_grad():
            for part in self._trained:
                grad = part.shard.grad
                part.handle.grad = torch.zeros_like(part.handle) if grad is None else _local(grad)

    def _holds_whole_gradients(self) -> bool:
        for fsdp_param in (p for unit in self.model.units for group in _groups(unit) for p in group.fsdp_params):
            unsharded = getattr(fsdp_param, "_unsharded_param", None)
            if fsdp_param.unsharded_accumulated_grad is not None or (
                unsharded is not None and unsharded.grad is not None
            ):
                return True
        return False

    def gradient_norm(self) -> Tensor:
        """2-norm over all gradients: squares of this rank's parts, summed over the shard axis; replicas hold equal ones."""
        own = gradient_norm([part.handle.grad for part in self._trained if part.handle.grad is not None])
        squares = own.double().square().to(self._device)
        dist.all_reduce(squares, group=self._group)
        if self._rest is not None:
            squares += self._rest.gradient_norm().double().square()
        return squares.sqrt().to(own.dtype)

    def untouched(self) -> list[nn.Parameter]:
        """Nothing: which parameters a rank used is gone once gradients are reduced; unused ones count as zero."""
        return []

    def close(self) -> None:
        """Give gathered weights back."""
        self.model.reshard()
        if self._rest is not None:
            self._rest.close()

    def state_bytes(self) -> tuple[int, int]:
        """Bytes of this rank's gradients, whole or in parts, and of what pads parts of weights and gradients."""
        held = held_bytes(self.model)
        return held.gradients, held.padding

    @property
    def _device(self) -> torch.device:
        return self._trained[0].handle.device if self._trained else torch.device("cpu")


@dataclass(frozen=True)
class HeldBytes:
    """What is there at this moment: bytes of numbers that count, and of the padding that is stored with them."""

    parameters: int
    gradients: int
    gathered: int
    padding: int


def held_bytes(model: ShardedModel) -> HeldBytes:
    """Measure what the units of a model hold, from the storages behind it."""
    parameters = gradients = gathered = stored = 0
    for fsdp_param in (p for unit in model.units for group in _groups(unit) for p in group.fsdp_params):
        parameters += _bytes(_local(fsdp_param.sharded_param))
        stored += fsdp_param._sharded_param_data.untyped_storage().nbytes()
        gathered += sum(t.untyped_storage().nbytes() for t in fsdp_param.all_gather_outputs)
        unsharded = getattr(fsdp_param, "_unsharded_param", None)
        kept = [fsdp_param.unsharded_accumulated_grad, None if unsharded is None else unsharded.grad]
        gradients += sum(_bytes(t) for t in kept if t is not None)
        if fsdp_param.sharded_param.grad is not None:
            gradients += _bytes(_local(fsdp_param.sharded_param.grad))
    grads = [_local(p.shard.grad) for p in model.parts if p.shard.grad is not None]
    flats = {g.untyped_storage().data_ptr(): g.untyped_storage().nbytes() for g in grads}
    partial = [g._partial_reduce_output for unit in model.units for g in _groups(unit)]
    kept_parts = sum(_bytes(t) for t in partial if t is not None)
    whole = sum(_bytes(p) for _, p in model.whole)
    whole_gradients = sum(_bytes(p.grad) for _, p in model.whole if p.grad is not None)
    return HeldBytes(
        parameters=parameters + whole,
        gradients=gradients + kept_parts + whole_gradients,
        gathered=gathered,
        padding=stored - parameters + sum(flats.values()) - sum(_bytes(g) for g in grads),
    )


def _kept_whole(model: nn.Module, blocks: list[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """Tensors that have no dim to split, or another type than the first of their unit: one unit has one type."""
    unit_of = {id(p): number for number, block in enumerate(blocks) for p in block.parameters()}
    first: dict[int | None, torch.dtype] = {}
    return [
        (name, p)
        for name, p in model.named_parameters()
        if p.ndim == 0 or p.dtype != first.setdefault(unit_of.get(id(p)), p.dtype)
    ]


def _policy(config: FsdpConfig, is_block: bool) -> MixedPrecisionPolicy:
    """What is gathered in 16 bit, and reduced in fp32 unless asked; inputs stay as they come (rotary tables are fp32)."""
    gathered = GATHERED[config.gather_dtype] if config.gather_dtype is not None and is_block else None
    reduced = torch.bfloat16 if config.reduce_bf16 else torch.float32 if gathered is not None else None
    return MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=reduced, cast_forward_inputs=False)


def _fill(model: nn.Module, initial: Iterable[tuple[str, Tensor]], rank: int, device: torch.device) -> None:
    """This rank's part of each whole tensor, on `device`; only one of them is whole at a time."""
    if any(p.is_meta for p in model.parameters()):
        model.to_empty(device=device)
    named = dict(model.named_parameters())
    missing = set(named)
    with torch.no_grad():
        for name, value in initial:
            target = named[name]
            missing.discard(name)
            if isinstance(target, DTensor):
                local = _local(target)
                rows = -(-target.shape[0] // target.device_mesh.size(-1))
                local.copy_(value[rank * rows : rank * rows + local.shape[0]])
            else:
                target.copy_(value)
    if missing:
        raise ValueError(f"no initial value for {sorted(missing)}")


def _taken(model: nn.Module, units: list[FSDPModule], whole_names: set[str]) -> ShardedModel:
    parts, whole, names = [], [], []
    for name, parameter in model.named_parameters():
        names.append(name)
        if name in whole_names:
            whole.append((name, parameter))
            continue
        handle = nn.Parameter(_local(parameter), requires_grad=parameter.requires_grad)
        parts.append(Part(name, parameter, handle))
    return ShardedModel(units, parts, whole, names)


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    local: Tensor = tensor._local_tensor
    return local.detach()


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _groups(unit: FSDPModule) -> list[torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup]:
    return unit._get_fsdp_state()._fsdp_param_groups


def whole_tensors(model: ShardedModel, group: dist.ProcessGroup) -> Iterator[tuple[str, Tensor]]:
    """Every parameter whole, one at a time, in the order of their names; all ranks iterate alike."""
    parts = {part.name: part for part in model.parts}
    kept = dict(model.whole)
    for name in sorted(model.names):
        yield name, (kept[name].detach() if name in kept else gather_whole(parts[name], group))

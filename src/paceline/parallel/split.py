"""A model whose weights are split over ranks that read the same tokens: what each rank holds, and what its gradients need.

Strategies of the model axes (tensor, pipeline) cut the model and describe the cut as a `ModelSplit`; those of the data axes
then treat what is left as the whole of it. `SplitReducer` puts the two together: sums over data ranks first, then over the
ranks that each hold a partial gradient of the same weight, and one norm over everything, each weight counted once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.checkpoint.boxes import Placement
from paceline.optim.clip import gradient_norm
from paceline.parallel.collectives import gather_objects
from paceline.parallel.reducer import Reducer


@dataclass(frozen=True)
class PartialGradients:
    """Weights that the ranks of `group` hold alike, and whose gradients each of them has a part of: they are summed."""

    group: dist.ProcessGroup
    names: tuple[str, ...]


@dataclass(frozen=True)
class ModelSplit:
    """The cut of a model over the ranks that read the same tokens.

    placements: this rank's box of each whole tensor that it holds a part of, by name.
    partial: gradients to sum beside the reduction over data ranks, in this order on every rank.
    copies: ranks of one replica that hold the same numbers of a tensor; 1 unless named.
    """

    placements: Mapping[str, Placement]
    partial: Sequence[PartialGradients] = ()
    copies: Mapping[str, int] = field(default_factory=dict)

    def followed_by(self, inner: ModelSplit) -> ModelSplit:
        """Both cuts, the inner one of what this one left."""
        placements = {name: part.within(self.placements[name]) for name, part in inner.placements.items()}
        names = {*self.copies, *inner.copies}
        copies = {name: self.copies.get(name, 1) * inner.copies.get(name, 1) for name in names}
        return ModelSplit(placements, (*inner.partial, *self.partial), copies)

    def cut(self, initial: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """This rank's part of each whole tensor; those that it has no part of are left out."""
        for name, value in initial:
            if name in self.placements:
                yield name, value[self.placements[name].slices].contiguous()


class SplitReducer:
    """Gradients of a split model: those of `data`, and what remains to be summed.

    Args:
        data: sums over the data ranks.
        named: what the reduced gradients are on, by name.
        split: of the model.
        copies: ranks of the world that hold the same part of each tensor's gradient, by name.
        world: all ranks.
        device: where numbers are summed.
    """

    def __init__(
        self,
        data: Reducer,
        named: Mapping[str, nn.Parameter],
        split: ModelSplit,
        copies: Mapping[str, int],
        *,
        world: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self.data = data
        self._world, self._device = world, device
        self._partial = [
            (p.group, [named[n] for n in p.names if n in named and named[n].requires_grad]) for p in split.partial
        ]
        self._by_copies: dict[int, list[nn.Parameter]] = {}
        for name, parameter in named.items():
            if parameter.requires_grad:
                self._by_copies.setdefault(copies[name], []).append(parameter)

    def begin(self, *, last: bool, first: bool) -> None:
        self.data.begin(last=last, first=first)

    def finish(self) -> None:
        """Finish the reduction over data ranks, then sum what is partial."""
        self.data.finish()
        for group, parameters in self._partial:
            sum_in_place([p.grad for p in parameters if p.grad is not None], group)

    def gradient_norm(self) -> Tensor:
        """2-norm over the whole model's gradient: squares of every part, each once, summed over all ranks."""
        squares = torch.zeros((), dtype=torch.float64, device=self._device)
        wide = torch.float32
        for copies, parameters in self._by_copies.items():
            norm = gradient_norm([p.grad for p in parameters if p.grad is not None])
            wide = torch.promote_types(wide, norm.dtype)
            squares += norm.to(squares).square() / copies
        dist.all_reduce(squares, group=self._world)
        return squares.sqrt().to(wide)

    def untouched(self) -> list[nn.Parameter]:
        return self.data.untouched()

    def close(self) -> None:
        self.data.close()

    def state_bytes(self) -> tuple[int, int]:
        return self.data.state_bytes()


def sum_in_place(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Sum small tensors over a group, in one collective per element type."""
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_type.setdefault(tensor.dtype, []).append(tensor)
    for alike in by_type.values():
        flat = torch.cat([t.reshape(-1) for t in alike])
        dist.all_reduce(flat, group=group)
        for tensor, summed in zip(alike, torch.split(flat, [t.numel() for t in alike]), strict=True):
            tensor.copy_(summed.view(tensor.shape))


class WholeWeights:
    """Every parameter whole on every rank, gathered over the world one at a time. All ranks make and iterate it alike.

    Args:
        named: this rank's parts.
        placements: their boxes.
        world: all ranks.
        device: where the tensors are.
    """

    def __init__(
        self,
        named: Mapping[str, Tensor],
        placements: Mapping[str, Placement],
        world: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._named, self._placements, self._world, self._device = named, placements, world, device
        self._owned: set[str] | None = None
        self._shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}

    def __call__(self) -> Iterator[tuple[str, Tensor]]:
        """Name and whole value, in the order of the names. Numbers travel as integers, so that every bit is kept."""
        owned = self._agree() if self._owned is None else self._owned
        for name in sorted(self._shapes):
            shape, dtype = self._shapes[name]
            whole = torch.zeros(shape, dtype=dtype, device=self._device)
            if name in owned:
                whole[self._placements[name].slices] = self._named[name].detach()
            flat = whole.view(-1).view(torch.uint8)
            if flat.numel():
                dist.all_reduce(flat, group=self._world)
            yield name, whole

    def _agree(self) -> set[str]:
        """The tensors whose box this rank sends: the lowest rank that holds it does."""
        told: list[dict[str, Any]] = gather_objects(
            {n: (tuple(p), self._named[n].dtype) for n, p in self._placements.items()}, self._world
        )
        sent: set[tuple[str, Any]] = set()
        self._owned = set()
        for rank, held in enumerate(told):
            for name, ((box, shape), dtype) in held.items():
                self._shapes[name] = (tuple(shape), dtype)
                if (name, box) not in sent:
                    sent.add((name, box))
                    if rank == dist.get_rank(self._world):
                        self._owned.add(name)
        return self._owned

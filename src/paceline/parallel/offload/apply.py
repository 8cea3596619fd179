"""AdamW whose moments live elsewhere: a chunk of them at a time is brought to the weights, updated and put back.

The update is torch's fused one on slices; slices end at multiples of `CHUNK_ELEMENTS`, so that every element takes the
same path through the vector kernel as in a whole tensor and the result is bitwise that of torch.optim.AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from paceline.optim.config import OptimizerSection
from paceline.optim.optimizer import parameter_groups
from paceline.parallel.offload.config import OffloadConfig
from paceline.parallel.offload.cost import CHUNK_ELEMENTS
from paceline.parallel.offload.store import MappedFile, PinnedHost, Store

MakeStore = Callable[[int, torch.dtype], Store]


def offloaded_adamw(
    optimizer: OptimizerSection, named: Iterable[tuple[str, torch.nn.Parameter]], config: OffloadConfig
) -> torch.optim.Optimizer:
    """AdamW over the parameters with its moments in `config.place`.

    Raises:
        DiskFull, JobError: the folder has no space for them, or cannot be written.
    """
    folder = config.folder
    if config.place == "none" or (config.place == "disk" and folder is None):
        raise ValueError("offloaded moments need a place")

    def make(elements: int, dtype: torch.dtype) -> Store:
        return PinnedHost(elements, dtype) if folder is None else MappedFile(folder, elements, dtype)

    groups = parameter_groups(named, optimizer.weight_decay)
    return OffloadedAdamW(groups, lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps, make_store=make)


class _Piece(NamedTuple):
    """Elements `first` to `last` of a parameter, and where its moments begin in the store."""

    parameter: Tensor
    first: int
    last: int


class _Moments(NamedTuple):
    """Flat views into the store of one parameter's moments, and where each begins in it."""

    store: Store
    average: Tensor
    average_begin: int
    square: Tensor
    square_begin: int


class OffloadedAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101) over moments in stores, one per element type.

    `state` has the entries of torch.optim.AdamW, views of the stores in the parameters' shapes. The attributes
    `grad_scale` and `found_inf` are read as torch's fused optimizers do.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        make_store: MakeStore,
        chunk_elements: int = CHUNK_ELEMENTS,
    ) -> None:
        super().__init__(list(groups), {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._chunk_elements = chunk_elements
        self._moments = self._lay_out(make_store)
        for parameter, moments in self._moments.items():
            shape = _local(parameter).shape
            self.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": moments.average.view(shape),
                "exp_avg_sq": moments.square.view(shape),
            }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            with_gradient = [p for p in group["params"] if p.grad is not None]
            for chunk in _chunks(with_gradient, self._chunk_elements):
                self._update(chunk, group)
            for parameter in with_gradient:
                self.state[parameter]["step"] += 1

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, with the moments copied into the stores."""
        super().load_state_dict(state_dict)
        for parameter, moments in self._moments.items():
            state = self.state[parameter]
            state["step"] = state["step"].clone()
            for name, flat in (("exp_avg", moments.average), ("exp_avg_sq", moments.square)):
                flat.copy_(state[name].reshape(-1))
                state[name] = flat.view(_local(parameter).shape)

    def _lay_out(self, make_store: MakeStore) -> dict[Tensor, _Moments]:
        """A store per element type: all first moments, then all second ones, in the order of the update."""
        moments: dict[Tensor, _Moments] = {}
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                by_type.setdefault(parameter.dtype, []).append(parameter)
        for dtype, parameters in by_type.items():
            sizes = [_local(p).numel() for p in parameters]
            total, begin = sum(sizes), 0
            store = make_store(2 * total, dtype)
            for parameter, size in zip(parameters, sizes, strict=True):
                ends = (begin, begin + size), (total + begin, total + begin + size)
                (a, b), (c, d) = ends
                moments[parameter] = _Moments(store, store.flat[a:b], a, store.flat[c:d], c)
                begin += size
        return moments

    def _update(self, chunk: list[_Piece], group: dict[str, Any]) -> None:
        weights = [_flat(p.parameter)[p.first : p.last] for p in chunk]
        gradients = [_flat(p.parameter.grad)[p.first : p.last] for p in chunk]
        kept = [self._moments[p.parameter] for p in chunk]
        averages = [m.average[p.first : p.last] for p, m in zip(chunk, kept, strict=True)]
        squares = [m.square[p.first : p.last] for p, m in zip(chunk, kept, strict=True)]
        near_averages = [a.to(w.device, non_blocking=True) for a, w in zip(averages, weights, strict=True)]
        near_squares = [s.to(w.device, non_blocking=True) for s, w in zip(squares, weights, strict=True)]
        adamw(
            weights, gradients, near_averages, near_squares, [],
            [self.state[p.parameter]["step"].clone() for p in chunk],
            fused=True, grad_scale=getattr(self, "grad_scale", None), found_inf=getattr(self, "found_inf", None),
            amsgrad=False, beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"],
            weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
        )  # fmt: skip
        for far, near in zip((*averages, *squares), (*near_averages, *near_squares), strict=True):
            if far is not near:
                far.copy_(near, non_blocking=True)
        for piece, moments in zip(chunk, kept, strict=True):
            moments.store.release(moments.average_begin + piece.first, moments.average_begin + piece.last)
            moments.store.release(moments.square_begin + piece.first, moments.square_begin + piece.last)


def _chunks(parameters: Iterable[Tensor], chunk_elements: int) -> Iterator[list[_Piece]]:
    """Pieces of at most `chunk_elements`, several small ones together."""
    chunk: list[_Piece] = []
    filled = 0
    for parameter in parameters:
        size = _local(parameter).numel()
        for first in range(0, size, chunk_elements):
            piece = _Piece(parameter, first, min(first + chunk_elements, size))
            if filled + piece.last - piece.first > chunk_elements:
                yield chunk
                chunk, filled = [], 0
            chunk.append(piece)
            filled += piece.last - piece.first
    if chunk:
        yield chunk


def _local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor that may be split over ranks."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _flat(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise ValueError("a parameter without a gradient is not updated")
    return _local(tensor).detach().view(-1)

"""One optimizer step: forward, backward, accumulation, reduction, clipping and the update, for any module.

The loss is a sum and a weight. Each micro-batch's sum is scaled by a constant before its backward pass, so that low
precision sums neither overflow nor coarsen; the true weight, summed over all micro-batches and ranks, corrects the
gradient once, inside the factor that also clips it. With prescale c, weight W and summed gradient G of c x loss sums:

    gradient of the objective = G / (c W),   factor = clip(|G| / (c W)) / (c W)

Under fp16 the loss scale is a part of c that changes between steps.

Policies (skip, save, stop) stand outside: this file reports what happened.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.optim.clip import clip_factor
from paceline.optim.optimizer import apply_step
from paceline.parallel.collectives import PendingSum, start_sum
from paceline.parallel.control import VOTES
from paceline.parallel.precision.loss_scale import LossScale
from paceline.parallel.precision.master import MasterWeights
from paceline.parallel.reducer import Reducer

Batch = dict[str, Any]
Forward = Callable[[nn.Module, Batch], Any]
Loss = Callable[[Any, Batch], tuple[Tensor, Tensor]]
Mark = Callable[[str], None]

NO_LABELS, NOT_FINITE, OVERFLOW = "no labels", "not finite", "overflow"
"""Why a step was skipped: its loss weight is zero, its loss or gradient norm is no number, or its gradient norm is none
while the loss scale can still be lowered."""


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did; equal on all ranks.

    `loss` is the objective: sum over all ranks and micro-batches divided by the weight over them; nan where it is zero.
    `skipped` is None, `NO_LABELS`, `NOT_FINITE` or `OVERFLOW`. `votes` are those of all ranks summed.
    """

    loss: float
    weight: float
    grad_norm: float
    lr: float
    skipped: str | None
    votes: tuple[float, ...] = (0.0,) * len(VOTES)


class Stages(Protocol):
    """The passes of a pipeline's stages on this rank; see `parallel.pipeline.apply.Pipeline`."""

    def run(
        self,
        microbatches: Sequence[Batch],
        through: Callable[[Batch], Tensor],
        loss: Callable[[Batch], Tensor],
        mark: Mark,
    ) -> None: ...

    def logits_at(self, tokens_1L: Tensor, at: int, /) -> Tensor: ...


class TrainStep:
    """Owns the parts of a step; one call is one optimizer step.

    Args:
        model: the module as wrapped by the strategies.
        forward, loss: the user's two functions; `loss` returns (sum, weight).
        optimizer: over the parameter handles taken after wrapping.
        reducer: sums gradients over the data ranks.
        group: all ranks, or None for one.
        prescale: the constant c, usually 1 / (global_batch x sequence_length).
        clip_norm: 0 turns clipping off.
        autocast: a context for forward and loss, such as bf16 autocast.
        device: where scalars live.
        loss_scale: fp16's, which the step raises and lowers.
        master: the weights that the optimizer updates where the model's are rounded from them.
        counts: whether this rank's loss sum and weight enter those of all ranks; not where another one has the same.
        stages: runs the passes where the model is cut into stages; on one that is not the last, `forward` returns what
            the next one goes on with, and `loss` is not called.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Forward,
        loss: Loss,
        optimizer: torch.optim.Optimizer,
        reducer: Reducer,
        *,
        group: dist.ProcessGroup | None,
        prescale: float,
        clip_norm: float,
        device: torch.device,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        loss_scale: LossScale | None = None,
        master: MasterWeights | None = None,
        counts: bool = True,
        stages: Stages | None = None,
    ) -> None:
        self.model = model
        self.forward = forward
        self.loss = loss
        self.optimizer = optimizer
        self.reducer = reducer
        self.group = group
        self.prescale = prescale
        self.clip_norm = clip_norm
        self.device = device
        self.autocast = autocast
        self.loss_scale = loss_scale
        self.master = master
        self.counts = counts
        self.stages = stages
        self.parameters = [p for g in optimizer.param_groups for p in g["params"]]

    def __call__(
        self,
        microbatches: Sequence[Batch],
        lr: float,
        mark: Mark = lambda part: None,
        votes: tuple[float, ...] = (0.0,) * len(VOTES),
    ) -> StepResult:
        """Run one optimizer step over this rank's micro-batches at learning rate `lr`.

        A step whose loss weight is zero, or whose gradient norm is not finite, leaves weights and moments untouched; all
        ranks decide alike since they decide on reduced values. `mark(part)` is called at the end of each part: forward
        and backward once a micro-batch, then reduce_exposed and optimizer. This rank's `votes` travel with the loss, so that
        what ranks agree on costs no collective of its own. Stages of a pipeline wait for each other in `bubble`.
        """
        totals = torch.tensor([0.0, 0.0, *votes], dtype=torch.float64, device=self.device)
        pending = (self._passes if self.stages is None else self._staged_passes)(microbatches, totals, mark)
        self.reducer.finish()
        loss_sum, weight, *agreed = pending.result().tolist()
        mark("reduce_exposed")
        result = self._update(loss_sum, weight, lr)
        mark("optimizer")
        return replace(result, votes=tuple(agreed))

    def _passes(self, microbatches: Sequence[Batch], totals: Tensor, mark: Mark) -> PendingSum:
        """Forward and backward of one micro-batch after the other; the sum of the totals is under way after the last."""
        for first, last, batch in _window(microbatches):
            self.reducer.begin(first=first, last=last)
            scaled = self._forward(batch, totals)
            mark("forward")
            if last:
                pending = start_sum(totals, self.group)
            scaled.backward()  # type: ignore[no-untyped-call]
            mark("backward")
        return pending

    def _staged_passes(self, microbatches: Sequence[Batch], totals: Tensor, mark: Mark) -> PendingSum:
        """All passes in the order of the pipeline; gradients are reduced after the last one."""
        assert self.stages is not None
        self.reducer.begin(first=True, last=False)
        self.stages.run(microbatches, self._through, lambda batch: self._forward(batch, totals), mark)
        self.reducer.begin(first=False, last=True)
        return start_sum(totals, self.group)

    def _through(self, batch: Batch) -> Tensor:
        with self.autocast():
            output: Tensor = self.forward(self.model, batch)
        return output

    def _forward(self, batch: Batch, totals: Tensor) -> Tensor:
        with self.autocast():
            loss_sum, weight = self.loss(self.forward(self.model, batch), batch)
        if self.counts:
            weight = torch.as_tensor(weight, device=self.device).double()
            totals[:2] += torch.stack([loss_sum.detach().double(), weight])
        return loss_sum * self._scale

    @property
    def _scale(self) -> float:
        return self.prescale * (1.0 if self.loss_scale is None else self.loss_scale.scale)

    def _update(self, loss_sum: float, weight: float, lr: float) -> StepResult:
        if weight == 0:
            return StepResult(math.nan, 0.0, 0.0, lr, NO_LABELS)
        loss = loss_sum / weight
        correction = 1.0 / (self._scale * weight)
        norm = self.reducer.gradient_norm() * correction
        grad_norm = float(norm)
        if not (math.isfinite(grad_norm) and math.isfinite(loss)):
            return StepResult(loss, weight, grad_norm, lr, self._bad(loss))
        if self.master is not None:
            self.master.take_gradients()
        apply_step(self.optimizer, clip_factor(norm, self.clip_norm) * correction, lr)
        if self.master is not None:
            self.master.publish()
        if self.loss_scale is not None:
            self.loss_scale.succeeded()
        return StepResult(loss, weight, grad_norm, lr, None)

    def _bad(self, loss: float) -> str:
        """Why a step is not taken: the loss scale is to blame where the loss itself is finite."""
        if self.loss_scale is None or not math.isfinite(loss):
            return NOT_FINITE
        reason = NOT_FINITE if self.loss_scale.at_floor else OVERFLOW
        self.loss_scale.overflowed()
        return reason


def on_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on `device`; numbers (tensors without dimensions) stay on the host, which reads them."""
    if device.type == "cpu":
        return batch
    return type(batch)(
        {
            key: value.to(device, non_blocking=True) if isinstance(value, Tensor) and value.ndim else value
            for key, value in batch.items()
        }
    )


def _window(microbatches: Sequence[Batch]) -> Iterator[tuple[bool, bool, Batch]]:
    for index, batch in enumerate(microbatches):
        yield index == 0, index == len(microbatches) - 1, batch

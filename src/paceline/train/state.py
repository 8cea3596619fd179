"""All that a resumed attempt needs of a session: tensors by name as this rank holds them, and the rest as plain JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoint.boxes import Placement
from paceline.checkpoint.placed import Placed
from paceline.optim.optimizer import materialise
from paceline.parallel.apply import Applied
from paceline.parallel.precision.loss_scale import LossScale
from paceline.train import random_state

MODEL, OPTIMIZER, BUFFER = "model", "optimizer", "buffer"
"""First parts of the tensors' names: `model/<parameter>`, `optimizer/<kind>/<parameter>`, `buffer/<rank>/<name>`."""


class TrainingState:
    """What a session must not lose.

    Args:
        model: under its strategies; its persistent buffers are each rank's own.
        applied: its parameters, as the optimizer knows them.
        optimizer: its moments are made here, if they are not there yet.
        loss_scale: fp16's.
        rank, device: this rank's.
    """

    def __init__(
        self,
        model: nn.Module,
        applied: Applied,
        optimizer: torch.optim.Optimizer,
        loss_scale: LossScale | None,
        *,
        rank: int,
        device: torch.device,
    ) -> None:
        materialise(optimizer)
        self._applied = applied
        self._optimizer = optimizer
        self._loss_scale = loss_scale
        self.device = device
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in applied.parameters}
        self._buffers = _persistent_buffers(model)
        self.rank = rank

    def weights(self) -> list[Placed]:
        """This rank's part of every parameter."""
        return [_placed(f"{MODEL}/{n}", p.detach(), self._applied.placements[n]) for n, p in self._applied.parameters]

    def moments(self) -> list[Placed]:
        """This rank's part of the optimizer's tensors: of every trainable parameter, by kind."""
        found = []
        for parameter, state in self._optimizer.state.items():
            name = self._names[parameter]
            placement = self._applied.placements[name]
            for kind, value in state.items():
                if kind != "step":
                    found.append(_placed(f"{OPTIMIZER}/{kind}/{name}", value, placement))
        return sorted(found, key=lambda placed: placed.name)

    def buffers(self, rank: int | None = None) -> list[Placed]:
        """This rank's persistent buffers, under the name that `rank` (this one unless given) saved them with."""
        owner = self.rank if rank is None else rank
        return [
            _placed(f"{BUFFER}/{owner}/{name}", value, Placement.whole(value.shape))
            for name, value in self._buffers.items()
        ]

    def placed(self) -> list[Placed]:
        """Every tensor to save, in a fixed order."""
        return [*self.weights(), *self.moments(), *self.buffers()]

    def shared(self) -> dict[str, Any]:
        """What is no tensor and equal on all ranks."""
        groups = [
            {key: value for key, value in group.items() if key != "params" and _is_plain(value)}
            for group in self._optimizer.param_groups
        ]
        scale = None if self._loss_scale is None else self._loss_scale.state_dict()
        return {"optimizer": {"groups": groups, "steps": self._steps()}, "loss_scale": scale}

    def own(self) -> dict[str, Any]:
        """What is this rank's alone."""
        return {"random": random_state.capture(self.device)}

    def restore_shared(self, state: Mapping[str, Any]) -> None:
        """The inverse of `shared`, once the tensors are there."""
        steps: Mapping[str, float] = state["optimizer"]["steps"]
        for parameter, held in self._optimizer.state.items():
            if "step" in held:
                held["step"].fill_(steps[self._names[parameter]])
        if self._loss_scale is not None and state["loss_scale"] is not None:
            self._loss_scale.load_state_dict(state["loss_scale"])

    def publish(self) -> None:
        """Pass restored weights on to the copies that the model computes with."""
        if self._applied.master is not None:
            self._applied.master.publish()
        self._applied.settle()

    def _steps(self) -> dict[str, float]:
        """Updates that each parameter has seen; one transfer from the device for all."""
        held = [(self._names[p], s["step"]) for p, s in self._optimizer.state.items() if "step" in s]
        if not held:
            return {}
        values = torch.stack([step for _, step in held]).tolist()
        return dict(sorted((name, value) for (name, _), value in zip(held, values, strict=True)))


def _placed(name: str, tensor: Tensor, placement: Placement) -> Placed:
    return Placed(name, tensor, placement.box, placement.shape)


def _persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that belong to a module's state, by name."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    state = model.state_dict(keep_vars=True)
    return {
        name: value.detach() for name, value in state.items() if isinstance(value, Tensor) and name not in parameters
    }


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, list, tuple))

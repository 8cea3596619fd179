"""All that a resumed attempt needs of a session: tensors by name as this rank holds them, and the rest as plain JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoint.boxes import Placement
from paceline.checkpoint.placed import Placed
from paceline.errors import JobError
from paceline.optim.optimizer import materialise
from paceline.parallel.apply import Applied
from paceline.parallel.precision.loss_scale import LossScale
from paceline.train import random_state

MODEL, OPTIMIZER, BUFFER = "model", "optimizer", "buffer"
"""First parts of the tensors' names: `model/<parameter>`, `optimizer/<kind>/<parameter>`, `buffer/<rank>/<name>`."""

STEPS = "optimizer_steps"
"""In a rank's own state: updates that each of its parameters has seen, where ranks have other parameters."""


class TrainingState:
    """What a session must not lose.

    Args:
        model: under its strategies; its persistent buffers are each rank's own.
        applied: its parameters, as the optimizer knows them.
        optimizer: its moments are made here, if they are not there yet.
        loss_scale: fp16's.
        rank, device: this rank's.

    Raises:
        JobError: a module's extra state (`get_extra_state`) is nothing that JSON has.

    Attributes:
        position: where this rank is in data that cannot be asked for sample number n; None where a step says it all.
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
        self._model = model
        # A module may put a new tensor in a buffer's place, so what is saved and loaded is a copy that stays where it is.
        self._buffers = {
            name: buffer.detach().clone(memory_format=torch.contiguous_format)
            for name, buffer in _persistent_buffers(model)
        }
        self.rank = rank
        self.position: Callable[[], Any] = lambda: None
        self._extra_states()

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
        """What is this rank's alone, at the moment of a save: also brings what `placed` gives up to it."""
        self._take_buffers()
        own = {"random": random_state.capture(self.device)}
        position, extra = self.position(), self._extra_states()
        if position is not None:
            own["position"] = position
        if extra:
            own["extra"] = extra
        if self._applied.stages is not None:
            # Ranks with other stages count the updates of other parameters.
            own[STEPS] = self._steps()
        return own

    def restore_shared(self, state: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]] = ()) -> None:
        """The inverse of `shared`, once the tensors are there; `ranks` is what each rank's `own` gave."""
        steps: dict[str, float] = dict(state["optimizer"]["steps"])
        for own in ranks:
            steps.update(own.get(STEPS, {}))
        for parameter, held in self._optimizer.state.items():
            if "step" in held:
                held["step"].fill_(steps[self._names[parameter]])
        if self._loss_scale is not None and state["loss_scale"] is not None:
            self._loss_scale.load_state_dict(state["loss_scale"])

    def restore_extra(self, ranks: Sequence[Mapping[str, Any]]) -> None:
        """Give the modules their extra state back; ranks beyond those that saved take theirs in turn, as with buffers.

        Raises:
            JobError: the modules that have one are not those of the checkpoint.
        """
        saved = ranks[self.rank % len(ranks)].get("extra", {}) if ranks else {}
        here = dict(_with_extra_state(self._model))
        if ranks and here.keys() != saved.keys():
            lacking, more = sorted(here.keys() - saved.keys()), sorted(saved.keys() - here.keys())
            raise JobError(
                "the checkpoint has the extra state of other modules: "
                f"it lacks {lacking or 'none'}, and only it has {more or 'none'}",
                values={"lacking": lacking, "unexpected": more},
            )
        for name, state in saved.items():
            here[name].set_extra_state(state)

    @torch.no_grad()
    def publish(self) -> None:
        """Pass what was loaded on to the tensors that the model computes with."""
        for name, buffer in _persistent_buffers(self._model):
            buffer.copy_(self._buffers[name])
        if self._applied.master is not None:
            self._applied.master.publish()
        self._applied.settle()

    @torch.no_grad()
    def _take_buffers(self) -> None:
        for name, buffer in _persistent_buffers(self._model):
            kept = self._buffers.get(name)
            if kept is None or kept.shape != buffer.shape or kept.dtype != buffer.dtype:
                was = "was not there" if kept is None else f"had {tuple(kept.shape)} {kept.dtype}"
                raise JobError(
                    f"buffer {name} has {tuple(buffer.shape)} {buffer.dtype} and {was} when training began, so that it "
                    "cannot be saved under its name",
                    values={"buffer": name, "shape": list(buffer.shape)},
                    hint="Register it with the shape that it keeps, or with persistent=False.",
                )
            kept.copy_(buffer)

    def _extra_states(self) -> dict[str, Any]:
        """What `get_extra_state` of each module gives, which must come out of JSON as it went in."""
        states = {name: module.get_extra_state() for name, module in _with_extra_state(self._model)}
        for name, state in states.items():
            try:
                is_plain = json.loads(json.dumps(state)) == state
            except (TypeError, ValueError):
                is_plain = False
            if not is_plain:
                raise JobError(
                    f"the extra state of module {name!r} ({type(state).__name__}) is nothing that JSON has, and a "
                    "checkpoint has no pickle in it",
                    values={"module": name, "type": type(state).__name__},
                    hint="Return numbers, strings, lists and dictionaries from get_extra_state, or register buffers.",
                )
        return states

    def _steps(self) -> dict[str, float]:
        """Updates that each parameter has seen; one transfer from the device for all."""
        held = [(self._names[p], s["step"]) for p, s in self._optimizer.state.items() if "step" in s]
        if not held:
            return {}
        values = torch.stack([step for _, step in held]).tolist()
        return dict(sorted((name, value) for (name, _), value in zip(held, values, strict=True)))


def _placed(name: str, tensor: Tensor, placement: Placement) -> Placed:
    return Placed(name, tensor, placement.box, placement.shape)


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that a module's state dict has, as they are now."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def _with_extra_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that have more to say than tensors."""
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield name, module


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, list, tuple))

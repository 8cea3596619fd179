"""What a module of one's own has to be for `paceline.Trainer`: refused in one sentence where it is not, else made alike."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.data.worker import inside_worker
from paceline.errors import JobError
from paceline.parallel.collectives import gather_objects
from paceline.parallel.layout import MODEL_AXES
from paceline.train.step import Batch, Forward, Loss

MODEL_AXIS_KEYS = {
    "sequence_parallel": "tp", "cp_method": "cp", "pp_schedule": "pp", "pp_stages_per_rank": "pp", "pp_layers": "pp",
}  # fmt: skip
"""Settings of the axes whose ranks share one model."""


def user_functions(forward: Forward | None, loss: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Forward, Loss]:
    """What is called for the output and for the loss.

    Raises:
        JobError: a forward beside a loss that runs the model itself.
    """
    first = next(iter(inspect.signature(loss).parameters), "")
    if first == "model":
        if forward is not None:
            raise JobError("loss(model, batch) runs the forward itself; forward has no effect beside it", key="forward")
        # The module itself takes the place of its output.
        return (lambda model, batch: model), loss
    return forward or _call_on_inputs, loss


def _call_on_inputs(model: nn.Module, batch: Batch) -> Any:
    if "inputs" not in batch:
        raise JobError(
            f'the batch has no "inputs" to call the model on; it has {", ".join(sorted(batch))}',
            key="forward",
            values={"keys": sorted(batch)},
            hint="Pass forward=lambda model, batch: model(batch[...]).",
        )
    return model(batch["inputs"])


def same_weights(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Rank 0's weights and buffers on every rank.

    Raises:
        JobError: a parameter has no values yet, or a rank has another model.
    """
    meta = [name for name, p in model.named_parameters() if p.is_meta]
    if meta:
        raise JobError(
            f"parameter {meta[0]} is on the meta device", key="model", hint="Give the model its weights first."
        )
    shapes = gather_objects([(n, tuple(p.shape), str(p.dtype)) for n, p in model.named_parameters()], group)
    for rank, other in enumerate(shapes):
        if other != shapes[0]:
            raise JobError(f"rank {rank} built another model than rank 0", key="model", values={"rank": rank})
    if group is not None:
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor, 0, group=group)


def require_doubles(model: nn.Module) -> None:
    """Refuse fp64 arithmetic with weights of another type: raises JobError."""
    single = [name for name, p in model.named_parameters() if p.dtype != torch.float64]
    if single:
        raise JobError(
            f"fp64 arithmetic needs fp64 weights, and {single[0]} is {model.get_parameter(single[0]).dtype}",
            key="parallel.precision",
            hint="Give the Trainer model.double() and data in float64.",
        )


def refuse_model_axes(degrees: Mapping[str, int]) -> None:
    """Refuse to cut a model that does not say how it is cut: raises JobError."""
    for axis in MODEL_AXES:
        if degrees[axis] > 1:
            raise JobError(
                f"{axis} = {degrees[axis]} needs a model whose parts say how they are split (a sharding table, a stage "
                "rule), and a module of one's own has none",
                key=f"parallel.{axis}",
                values={axis: degrees[axis], "valid": 1},
                hint=f"Set parallel.{axis}=1 and split the weights with dp_shard, or train a model of the catalogue with "
                "`paceline train`.",
            )


def refuse_keys_of_model_axes(given: Mapping[str, Any]) -> None:
    """Refuse keys of `[parallel]` that such a model would ignore: raises JobError."""
    for key, axis in MODEL_AXIS_KEYS.items():
        if key in given:
            raise JobError(
                f"has no effect on a module of one's own, which cannot be split along {axis}",
                key=f"parallel.{key}",
                values={key: given[key]},
                hint="Remove it.",
            )
    if "layout" in given:
        raise JobError(
            "has no effect on a module of one's own: the planner knows what models of the catalogue compute, and no other",
            key="parallel.layout",
            values={"layout": given["layout"]},
            hint="Remove it; unless degrees are given, every rank is a replica.",
        )


def refuse_loader_worker() -> None:
    """Refuse to train in a loader's process, which runs an unguarded script again: raises JobError."""
    if inside_worker():
        raise JobError(
            "a loader worker runs the script again and came to paceline.Trainer",
            hint='Put the training under: if __name__ == "__main__":',
        )

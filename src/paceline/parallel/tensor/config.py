"""Tensor parallelism: the axis it brings, its settings, and what it cannot split. Imports no torch.

Which weight is cut along which dim is the model's own statement (`model.sharding`). A rank holds whole heads and an equal
slice of the feed-forward layer. Rows of the vocabulary are dealt out as evenly as they go, so that any number of them
works and none is there only to fill up. Where there are fewer key and value heads than ranks, several ranks hold the same
one, and its gradients are summed over them.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from paceline.checkpoint.boxes import Box, Placement
from paceline.errors import JobError
from paceline.model.sharding import SHARDING
from paceline.model.spec import ModelSpec, Parameter, parameters
from paceline.parallel.config import ParallelSection
from paceline.parallel.layout import Layout

AXIS = "tp"


class TensorConfig(msgspec.Struct, frozen=True):
    """Resolved settings. With `sequence_parallel` a rank holds a slice of the positions between two products."""

    degree: int = 1
    sequence_parallel: bool = False


NO_TENSOR = TensorConfig()


def tensor_config(
    parallel: ParallelSection, spec: ModelSpec, layout: Layout, sequence_length: int, is_set: Callable[[str], bool]
) -> TensorConfig:
    """The settings that `[parallel]` asks for.

    Raises:
        JobError: the model or the sequence does not divide; says which degrees would do.
    """
    asked = parallel.sequence_parallel
    if layout.tp == 1:
        if asked is not None and is_set("parallel.sequence_parallel"):
            raise JobError(
                "has no effect with tp = 1: one rank holds all positions",
                key="parallel.sequence_parallel",
                values={"sequence_parallel": asked, "tp": 1},
                hint="Remove it, or set parallel.tp.",
            )
        return NO_TENSOR
    _check_model(spec, layout.tp)
    divides = sequence_length % (layout.cp * layout.tp) == 0
    if asked and not divides:
        ways = f"tp {layout.tp}" if layout.cp == 1 else f"cp {layout.cp} x tp {layout.tp}"
        near = max(1, round(sequence_length / (layout.cp * layout.tp))) * layout.cp * layout.tp
        raise JobError(
            f"{sequence_length} positions do not divide over {ways} ranks",
            key="parallel.sequence_parallel",
            values={"sequence_length": sequence_length, "cp": layout.cp, "tp": layout.tp},
            hint=f"Set data.sequence_length={near}, or parallel.sequence_parallel=false.",
        )
    return TensorConfig(layout.tp, divides if asked is None else asked)


def rank_spec(spec: ModelSpec, degree: int) -> ModelSpec:
    """What one rank computes with, as a model of its own: its heads, its slices; rank 0 has most rows of the vocabulary."""
    return msgspec.structs.replace(
        spec,
        num_heads=spec.num_heads // degree,
        num_kv_heads=max(1, spec.num_kv_heads // degree),
        ffn_dim=spec.ffn_dim // degree,
        vocab_size=-(-spec.vocab_size // degree),
    )


def kv_copies(spec: ModelSpec, degree: int) -> int:
    """Ranks that hold the same key and value heads; 1 where each has its own."""
    return max(1, degree // spec.num_kv_heads)


def placement(parameter: Parameter, spec: ModelSpec, degree: int, rank: int) -> Placement:
    """The box of a whole tensor that rank number `rank` of `degree` holds."""
    split = SHARDING[parameter.role]
    whole = Placement.whole(parameter.shape)
    if split.dim is None or split.unit is None or degree == 1:
        return whole
    units = getattr(spec, split.unit)
    if split.unit == "num_kv_heads":
        copies = kv_copies(spec, degree)
        rank, degree = rank // copies, degree // copies
    width = parameter.shape[split.dim] // units
    begin, end = (units * at // degree * width for at in (rank, rank + 1))
    offset, shape = list(whole.box.offset), list(parameter.shape)
    offset[split.dim], shape[split.dim] = begin, end - begin
    return Placement(Box(tuple(offset), tuple(shape)), parameter.shape)


def placements(spec: ModelSpec, degree: int, rank: int) -> dict[str, Placement]:
    """Of every parameter, by name, in the module's order."""
    return {p.name: placement(p, spec, degree, rank) for p in parameters(spec)}


def copies_of(parameter: Parameter, spec: ModelSpec, degree: int) -> int:
    """Ranks of the group that hold the same numbers of a tensor."""
    split = SHARDING[parameter.role]
    if split.dim is None:
        return degree
    return kv_copies(spec, degree) if split.unit == "num_kv_heads" else 1


def is_partial(parameter: Parameter, sequence_parallel: bool) -> bool:
    """Whether each rank has a part of a whole tensor's gradient: norms of heads see its own heads alone, and with
    `sequence_parallel` everything between the products sees its own positions alone."""
    if SHARDING[parameter.role].dim is not None:
        return False
    return parameter.role == "head_norm" or sequence_parallel


def _check_model(spec: ModelSpec, degree: int) -> None:
    works = degrees_that_work(spec)
    for key, units, what in (
        ("num_heads", spec.num_heads, "query heads"),
        ("num_kv_heads", spec.num_kv_heads, "key and value heads"),
        ("ffn_dim", spec.ffn_dim, "numbers of the feed-forward layer"),
        ("vocab_size", spec.vocab_size, "rows of the vocabulary"),
    ):
        if _splits(key, units, degree):
            continue
        raise JobError(
            f"{units} {what} cannot be split over {degree} ranks",
            key="parallel.tp",
            values={key: units, "tp": degree, "works": works},
            hint=f"Degrees that split this model: {', '.join(map(str, works))}.",
        )


def degrees_that_work(spec: ModelSpec) -> list[int]:
    """Every degree that splits a model."""
    return [d for d in range(1, spec.num_heads + 1) if all(_splits(k, getattr(spec, k), d) for k in _UNITS)]


_UNITS = ("num_heads", "num_kv_heads", "ffn_dim", "vocab_size")


def _splits(key: str, units: int, degree: int) -> bool:
    if key == "vocab_size":
        return units >= degree
    return units % degree == 0 or (key == "num_kv_heads" and degree % units == 0)

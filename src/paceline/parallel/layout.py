"""The layout: degrees of the mesh axes, resolved against a number of ranks. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from paceline.errors import JobError
from paceline.parallel.config import ParallelSection

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Mesh axes from the slowest to the fastest varying: neighbours in `tp` are neighbours in rank."""

DATA_AXES = "dp"
"""`dp_replicate` and `dp_shard` together: the ranks that read samples of their own."""

SHARDS = ("dp_shard", "cp")
"""Axes that fully sharded state is split over: context ranks hold equal weights, so they take a part each."""

REPLICAS = ("dp_replicate", "cp")
"""Axes whose ranks hold equal whole gradients of different tokens where nothing is sharded."""

TOKENS = ("dp_replicate", "dp_shard", "cp")
"""Axes whose ranks see different tokens."""

MODEL_AXES = ("pp", "cp", "tp")
"""Axes that split one replica's model or sequences: their ranks read the same samples."""

Place = Literal["inside a node", "across nodes", "both"]


class Layout(msgspec.Struct, frozen=True):
    """How many ways each axis splits; the product is the world size."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1

    @property
    def world_size(self) -> int:
        return math.prod(self.degrees().values())

    @property
    def dp(self) -> int:
        """Ways in which the global batch is split: replicas times shards."""
        return self.dp_replicate * self.dp_shard

    def degrees(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def shards(self) -> int:
        """Parts that the state of a replica is cut into by sharding; 1 without it."""
        return self.dp_shard * self.cp if self.dp_shard > 1 else 1

    @property
    def replicas(self) -> int:
        """Ranks that hold the same weights or parts of them, and sum their gradients as replicas do."""
        return self.dp_replicate if self.dp_shard > 1 else self.dp_replicate * self.cp

    def split_axes(self) -> tuple[str, ...]:
        """Axes of more than one rank."""
        return tuple(axis for axis, degree in self.degrees().items() if degree > 1)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank stands on each axis."""
        found = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, self.degrees()[axis])
        return {axis: found[axis] for axis in AXES}

    def data_rank(self, rank: int) -> int:
        """Which of the `dp` slices of the global batch a rank reads: the same one for all ranks of a model."""
        at = self.coordinates(rank)
        return at["dp_replicate"] * self.dp_shard + at["dp_shard"]

    def counts_loss(self, rank: int) -> bool:
        """Whether a rank adds its loss and weight to the sum: one of those that compute the same loss. Stages of a
        pipeline that do not end in a loss have none to add."""
        return self.coordinates(rank)["tp"] == 0

    def counts_samples(self, rank: int) -> bool:
        """Whether a rank speaks for the samples of its data rank."""
        at = self.coordinates(rank)
        return at["tp"] == at["cp"] == at["pp"] == 0

    def place(self, axis: str, ranks_per_node: int) -> Place:
        """Whether the ranks that share an axis are on one node, each on another one, or some of both.

        Ranks count through the axes in the order of `AXES`, nodes through the ranks.
        """
        faster = AXES[AXES.index(axis) + 1 :]
        stride = math.prod(self.degrees()[other] for other in faster)
        reach = stride * self.degrees()[axis]
        if self.world_size <= ranks_per_node or ranks_per_node % reach == 0:
            return "inside a node"
        return "across nodes" if stride % ranks_per_node == 0 else "both"

    def to_record(self) -> dict[str, Any]:
        return msgspec.structs.asdict(self)

    def __str__(self) -> str:
        named = [f"{axis}={degree}" for axis, degree in self.degrees().items() if degree > 1]
        return " ".join(named) or "one rank"


def axes_name(layout: Layout, axes: tuple[str, ...] = AXES) -> str:
    """How the group over several axes is called: those that split something, with a plus between, `dp` for both data axes."""
    ordered = [axis for axis in layout.split_axes() if axis in axes]
    if "dp_replicate" in ordered and "dp_shard" in ordered:
        at = ordered.index("dp_replicate")
        ordered[at : at + 2] = [DATA_AXES]
    return "+".join(ordered)


def resolve_layout(parallel: ParallelSection, world_size: int, is_set: Callable[[str], bool]) -> Layout:
    """The layout on `world_size` ranks.

    One axis may be -1, "what the others leave". The default -1 of `dp_replicate` gives way to a -1 that the user wrote.

    Raises:
        JobError: several axes are -1, a degree is 0, or the product does not meet the number of ranks.
    """
    degrees = {axis: int(getattr(parallel, axis)) for axis in AXES}
    if not is_set("parallel.dp_replicate") and any(d == -1 for axis, d in degrees.items() if axis != "dp_replicate"):
        degrees["dp_replicate"] = 1
    for axis, degree in degrees.items():
        if degree == 0:
            raise JobError(f"a degree is 1 or more, or -1; {axis} = 0", key=f"parallel.{axis}", values=degrees)
    open_axes = [axis for axis, degree in degrees.items() if degree == -1]
    if len(open_axes) > 1:
        raise JobError(f"only one axis can be -1, and {' and '.join(open_axes)} are", key="parallel", values=degrees)
    fixed = math.prod(degree for degree in degrees.values() if degree != -1)
    if (open_axes and world_size % fixed) or (not open_axes and fixed != world_size):
        product = " x ".join(f"{axis} {d}" for axis, d in degrees.items() if d not in (1, -1)) or "1"
        raise JobError(
            f"{product} = {fixed} does not {'divide' if open_axes else 'equal'} the {world_size} ranks",
            key="parallel",
            values={**degrees, "ranks": world_size},
            hint=f"Start {_next_multiple(world_size, fixed)} ranks with --procs, or let the degrees multiply to "
            f"{_divisors(world_size) if open_axes else world_size}.",
        )
    if open_axes:
        degrees[open_axes[0]] = world_size // fixed
    return Layout(**degrees)


def _divisors(number: int) -> str:
    divisors = [str(d) for d in range(1, number + 1) if number % d == 0]
    return " or ".join(divisors if len(divisors) <= 8 else [*divisors[:4], *divisors[-4:]])


def _next_multiple(world_size: int, fixed: int) -> int:
    return max(1, round(world_size / fixed)) * fixed

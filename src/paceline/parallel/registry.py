"""The strategies that exist, by the axes they serve. A new one is a folder and one line here. Imports no torch."""

from __future__ import annotations

from paceline.errors import JobError
from paceline.parallel.layout import AXES, Layout

STRATEGY_OF_AXIS: dict[str, str] = {
    "dp_replicate": "ddp",
    "dp_shard": "fsdp",
    "cp": "context",
    "tp": "tensor",
    "pp": "pipeline",
}
"""Axis -> strategy: the package `paceline.parallel.<strategy>`."""

DATA_STRATEGIES = ("ddp", "fsdp")
"""Strategies of the axes whose ranks read samples of their own; the others change what the model is."""

ALSO_SERVES: dict[str, str] = {"dp_replicate": "fsdp"}
"""An axis that another strategy of the same layout takes over: what is sharded is also summed between replicas by fsdp."""


def strategies(layout: Layout) -> list[str]:
    """Strategies that a layout needs, in the order of the mesh axes.

    Raises:
        JobError: an axis has a degree above 1 and no strategy serves it.
    """
    needed: list[str] = []
    for axis in AXES:
        degree = layout.degrees()[axis]
        if degree == 1:
            continue
        if axis not in STRATEGY_OF_AXIS:
            raise JobError(
                f"no strategy of this version splits along {axis}; {axis} = {degree} cannot run",
                key=f"parallel.{axis}",
                values={"axis": axis, "degree": degree, "served": sorted(STRATEGY_OF_AXIS)},
                hint=f"Set parallel.{axis}=1; the axes served are: {', '.join(sorted(STRATEGY_OF_AXIS))}.",
            )
        needed.append(STRATEGY_OF_AXIS[axis])
        if (other := ALSO_SERVES.get(axis)) and any(
            STRATEGY_OF_AXIS.get(a) == other and layout.degrees()[a] > 1 for a in AXES
        ):
            needed[-1] = other
    return list(dict.fromkeys(needed))

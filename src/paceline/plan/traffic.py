"""What the collectives of a step put on the wire, and how long they take where the cluster was measured. No torch."""

from __future__ import annotations

from typing import Any

import msgspec

from paceline.cluster.measured import ACROSS_NODES, IN_NODE, MeasuredCluster, TierName
from paceline.job.resolve import Resolved, resolved_cost
from paceline.parallel.layout import DATA_AXES, Layout
from paceline.parallel.strategy import Collective
from paceline.parallel.wire import GLOO, bus_factor, sent_bytes


def traffic(resolved: Resolved, ranks_per_node: int | None, measured: MeasuredCluster | None) -> list[dict[str, Any]]:
    """Each collective of a step with its ranks, its tier, the bytes that a rank sends and, where measured, its seconds.

    `seconds` is the time of all calls of a step one after the other, before any overlap; None where the cluster was not
    measured.
    """
    backend = GLOO if resolved.host.device_kind == "cpu" else "nccl"
    return [
        _record(collective, resolved.layout, ranks_per_node or resolved.layout.world_size, backend, measured)
        for collective in resolved_cost(resolved).collectives
    ]


def degree(axis: str, layout: Layout) -> int:
    """Ranks of the group that `axes_name` calls `axis`."""
    ranks = 1
    for name in axis.split("+"):
        ranks *= layout.dp if name == DATA_AXES else layout.degrees()[name]
    return ranks


def tier(axis: str, layout: Layout, ranks_per_node: int) -> TierName:
    """In the node where all ranks of the group are."""
    names = [n for part in axis.split("+") for n in (("dp_replicate", "dp_shard") if part == DATA_AXES else (part,))]
    places = {layout.place(name, ranks_per_node) for name in names}
    return IN_NODE if places == {"inside a node"} else ACROSS_NODES


def _record(
    collective: Collective, layout: Layout, ranks_per_node: int, backend: str, measured: MeasuredCluster | None
) -> dict[str, Any]:
    ranks = degree(collective.axis, layout)
    where = tier(collective.axis, layout, ranks_per_node)
    seconds, error = _seconds(collective, ranks, where, measured)
    return {
        **msgspec.structs.asdict(collective),
        "ranks": ranks,
        "tier": where,
        "sent_bytes": round(sent_bytes(collective.kind, collective.size_bytes, ranks, backend)),
        "seconds": seconds,
        "seconds_error": error,
    }


def _seconds(
    collective: Collective, ranks: int, where: TierName, measured: MeasuredCluster | None
) -> tuple[float | None, float | None]:
    """Seconds of all calls, and their stated error. Another number of ranks sends in proportion to the bus factor."""
    fit = measured.fit(collective.kind, where) if measured is not None else None
    if fit is None or not collective.count:
        return None, None
    size = collective.size_bytes / collective.count
    scaled = size * bus_factor(collective.kind, ranks) / bus_factor(collective.kind, fit.ranks)
    return collective.count * fit.seconds(scaled), fit.error_at(scaled)

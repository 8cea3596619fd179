"""Where nothing fits: how many nodes would do, and what else would. No torch."""

from __future__ import annotations

import msgspec

from paceline.cluster.spec import Cluster
from paceline.errors import PacelineError
from paceline.job.load import Job
from paceline.plan.search import Search
from paceline.plan.weigh import Weighed
from paceline.units import format_bytes

MOST_NODES = 4096


def would_fit(job: Job, cluster: Cluster, nearest: Weighed | None) -> list[str]:
    """What would make the job fit, in words: the fewest nodes that are found, memory, moments elsewhere."""
    ways = []
    if cluster.host.device_kind != "cpu" and (found := fewest_nodes(job, cluster)) is not None:
        nodes, weighed = found
        devices = nodes * cluster.devices_per_node
        ways.append(
            f"{nodes} nodes of {cluster.devices_per_node} such devices ({devices} in all) would do: {weighed.choice} needs "
            f"{format_bytes(weighed.memory_bytes)} of a rank"
        )
    if nearest is not None:
        ways.append(
            f"or devices with at least {format_bytes(nearest.memory_bytes)} of memory each, in the nearest layout"
        )
        moments = nearest.resolved.memory.moments_bytes
        if job.optimizer.name == "adamw" and nearest.resolved.transforms.offload.place == "none" and moments:
            place = "disk" if cluster.host.device_kind == "cpu" else "host"
            ways.append(
                f"parallel.offload={place} takes {format_bytes(moments)} of moments out of it, for slower steps"
            )
    return ways


def fewest_nodes(job: Job, cluster: Cluster) -> tuple[int, Weighed] | None:
    """Nodes on which the job fits, by doubling and then halving the difference; None up to `MOST_NODES`."""
    low, high = cluster.nodes, cluster.nodes
    found: Weighed | None = None
    while found is None:
        low, high = high, 2 * high
        if high > MOST_NODES:
            return None
        found = _fits(job, cluster, high)
    while high - low > 1:
        middle = (low + high) // 2
        smaller = _fits(job, cluster, middle)
        low, high, found = (low, middle, smaller) if smaller is not None else (middle, high, found)
    return high, found


def _fits(job: Job, cluster: Cluster, nodes: int) -> Weighed | None:
    try:
        weighed = Search(job, msgspec.structs.replace(cluster, nodes=nodes)).nearest()
    except PacelineError:
        return None
    return weighed if weighed is not None and weighed.resolved.fits else None

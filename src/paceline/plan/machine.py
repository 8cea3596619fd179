"""The device, the link and the fabric of a cluster, each from the catalogue, and what had to be assumed. No torch."""

from __future__ import annotations

import msgspec

from paceline.cluster.catalogue import catalogue_key, device, device_names, fabric
from paceline.cluster.device import Device, Link
from paceline.cluster.spec import Cluster
from paceline.errors import UsageError

ASSUMED_FABRIC = "100gbit"
"""Between nodes of a cluster that names no fabric: one plain port a node. Said among the assumptions, never silent."""


class Machine(msgspec.Struct, frozen=True):
    """A device with what joins it to the others of its node and to those of other nodes; what was assumed of it."""

    device: Device
    link: Link | None
    fabric: Link | None
    assumed: tuple[str, ...] = ()


def machine(cluster: Cluster) -> Machine:
    """What the catalogue knows of a cluster's devices.

    Of a processor it knows one core; each rank is taken to have an equal share of the host's cores.

    Raises:
        UsageError: no device of the catalogue calls itself as this host's do.
    """
    said = []
    between = cluster.fabric
    if between is None and cluster.nodes > 1:
        between = fabric(ASSUMED_FABRIC, cluster.devices_per_node)
        said.append(
            f"--cluster {cluster.text} names no fabric: {ASSUMED_FABRIC} Ethernet is assumed, one port a node; "
            "name yours, as in :ndr400"
        )
    if cluster.host.device_kind == "cpu":
        whole, of_cores = _of_cores(cluster)
        return Machine(whole, whole.link, between, (*said, of_cores))
    found = cluster.device or device(_key(cluster))
    return Machine(found, found.link, between, tuple(said))


def _key(cluster: Cluster) -> str:
    key = catalogue_key(cluster.host.device_name)
    if key is None:
        raise UsageError(
            f"no device of the catalogue calls itself {cluster.host.device_name!r}",
            key="--cluster",
            values={"device": cluster.host.device_name, "known": device_names()},
            hint=f"Name one that is like it, as NODESxDEVICESxDEVICE: {', '.join(device_names())}.",
        )
    return key


def _of_cores(cluster: Cluster) -> tuple[Device, str]:
    core = device("cpu")
    cores = max(1, cluster.host.cores // cluster.devices_per_node)
    if cluster.host.fast_bf16:
        core = _with_fast_bf16(core)
    whole = msgspec.structs.replace(
        core,
        name=cluster.host.device_name,
        memory_bytes=cluster.host.memory_bytes // cluster.devices_per_node,
        peak={kind: cores * rate for kind, rate in core.peak.items()},
        curves=tuple(msgspec.structs.replace(c, rates=tuple(cores * r for r in c.rates)) for c in core.curves),
        memory_bytes_per_second=core.memory_bytes_per_second * cores,
    )
    return whole, f"a rank has {cores} of the host's {cluster.host.cores} cores, each as fast as the catalogue says"


def _with_fast_bf16(core: Device) -> Device:
    """A core with instructions of its own for bf16 products: two numbers in the place of one of fp32."""
    rates = {c.dtype: c for c in core.curves}
    curve = msgspec.structs.replace(rates["fp32"], dtype="bf16", rates=tuple(2 * r for r in rates["fp32"].rates))
    return msgspec.structs.replace(
        core, peak={**core.peak, "bf16": 2 * core.peak["fp32"]},
        curves=(*(c for c in core.curves if c.dtype != "bf16"), curve),
    )  # fmt: skip

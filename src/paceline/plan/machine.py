"""The device, the link and the fabric that a cluster names. No torch."""

from __future__ import annotations

import msgspec

from paceline.cluster.catalogue import device, fabric
from paceline.cluster.device import Device, Link
from paceline.cluster.spec import Cluster, catalogue_key, device_names, named_parts
from paceline.errors import UsageError


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
        UsageError: the catalogue lacks the device or the fabric; names the nearest.
    """
    named = named_parts(cluster.text)
    fabric_link = fabric(named.fabric) if named is not None and named.fabric else None
    if cluster.host.device_kind == "cpu":
        return _of_cores(cluster, fabric_link)
    key = named.device if named is not None else catalogue_key(cluster.host.device_name)
    if key is None:
        raise UsageError(
            f"no device of the catalogue calls itself {cluster.host.device_name!r}",
            values={"device": cluster.host.device_name, "known": device_names()},
            hint=f"Name one that is like it with --cluster NODESxDEVICESxDEVICE: {', '.join(device_names())}.",
        )
    found = device(key)
    return Machine(found, found.link, fabric_link)


def _of_cores(cluster: Cluster, fabric_link: Link | None) -> Machine:
    core = device("cpu")
    cores = max(1, cluster.host.cores // cluster.devices_per_node)
    whole = msgspec.structs.replace(
        core,
        name=cluster.host.device_name,
        memory_bytes=cluster.host.memory_bytes // cluster.devices_per_node,
        peak={kind: cores * rate for kind, rate in core.peak.items()},
        curves=tuple(msgspec.structs.replace(c, rates=tuple(cores * r for r in c.rates)) for c in core.curves),
        memory_bytes_per_second=core.memory_bytes_per_second * cores,
    )
    said = f"a rank has {cores} of the host's {cluster.host.cores} cores, each as the catalogue says"
    return Machine(whole, core.link, fabric_link, (said,))

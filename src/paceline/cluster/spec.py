"""What a job runs on: nodes of equal devices, from `--cluster`. Imports no torch."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from paceline.cluster.catalogue import device, device_names, fabric, has_fast_bf16
from paceline.cluster.device import Device, Link
from paceline.cluster.measured import MeasuredCluster, load_measured
from paceline.cluster.nodes import find_node, unknown_node
from paceline.cluster.probe import Host
from paceline.errors import UsageError

HERE = "here"
SUFFIX = ".toml"
MEASURED_FILE = "cluster.toml"
"""Where `here` looks for what was measured."""

ASSUMED_COMPILER = "g++"
"""A cluster that is only described is taken to have what compiled blocks need."""

_PATTERN = re.compile(r"(\d+)x(\d+)x([A-Za-z0-9.-]+)(?::([A-Za-z0-9.-]+))?")
_SOLD = re.compile(r"(\d+)x([A-Za-z][A-Za-z0-9._-]*)(?::([A-Za-z0-9.-]+))?")


class Cluster(msgspec.Struct, frozen=True):
    """`nodes` nodes of `devices_per_node` devices; `host` is one of them. `measured`: what a bench found out about it.

    device, fabric: of the catalogue, where the cluster is described by their names. node: key of a type as sold.
    """

    text: str
    nodes: int
    devices_per_node: int
    host: Host
    measured: MeasuredCluster | None = None
    device: Device | None = None
    fabric: Link | None = None
    node: str | None = None

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node


def parse_cluster(text: str, here: Host) -> Cluster:
    """`here`, a measured cluster's file, `NODESxDEVICESxDEVICE[:FABRIC]` such as `1x8xa100-sxm-80g`, or `NODESxNODETYPE`
    of nodes as sold such as `4xp5.48xlarge`.

    `here` takes what was measured from `cluster.toml` in the working directory, where it is of this host.

    Raises:
        UsageError: the text has another form, or names a device that the catalogue lacks; or the file is unusable.
    """
    if text == HERE:
        return Cluster(text, 1, here.default_procs, here, _measured_here(here))
    if text.endswith(SUFFIX):
        measured = load_measured(Path(text))
        return Cluster(text, measured.nodes, measured.devices_per_node, measured.host, measured)
    nodes, devices, name, network, sold = _words(text)
    if nodes < 1 or devices < 1:
        raise _no_devices(text, nodes, devices)
    found = device(name)
    between = fabric(network, devices) if network else None
    host = here if name == "cpu" else _catalog_host(found, devices)
    return Cluster(text, nodes, devices, host, device=found, fabric=between, node=sold)


def _words(text: str) -> tuple[int, int, str, str | None, str | None]:
    """Nodes, devices per node, device, network and node type that a description names."""
    if match := _PATTERN.fullmatch(text):
        return int(match[1]), int(match[2]), match[3], match[4], None
    if match := _SOLD.fullmatch(text):
        sold = find_node(match[2])
        if sold is None:
            if match[2] in device_names():
                raise UsageError(
                    f"--cluster {text!r} does not say how many devices a node has",
                    values={"cluster": text},
                    hint=f"For example {match[1]}x8x{match[2]}.",
                )
            raise unknown_node(match[2])
        return int(match[1]), sold.devices, sold.device, match[3] or sold.fabric, sold.key
    raise UsageError(
        f"--cluster {text!r} is neither here, nor NODESxDEVICESxDEVICE[:FABRIC], nor NODESxNODETYPE",
        values={"cluster": text},
        hint="For example 1x8xa100-sxm-80g, 4x8xh100-sxm:ndr400, 4xp5.48xlarge or 2x2xcpu:100mbit; a measured cluster is a "
        ".toml file.",
    )


def _no_devices(text: str, nodes: int, devices: int) -> UsageError:
    least = re.sub(r"^(\d+x)\d+x", rf"\g<1>{max(1, devices)}x", re.sub(r"^\d+", str(max(1, nodes)), text))
    return UsageError(
        f"--cluster {text!r} has {nodes} nodes of {devices} devices; nothing runs on none",
        key="--cluster",
        values={"cluster": text, "nodes": nodes, "devices_per_node": devices},
        hint=f"The nearest that has devices is --cluster {least}.",
    )


def _measured_here(here: Host) -> MeasuredCluster | None:
    path = Path(MEASURED_FILE)
    if not path.is_file():
        return None
    measured = load_measured(path)
    return measured if (measured.host.name, measured.host.device_name) == (here.name, here.device_name) else None


def _catalog_host(found: Device, devices: int) -> Host:
    return Host(
        name=found.key,
        device_kind="cuda",
        devices=devices,
        device_name=found.name,
        device_memory_bytes=found.memory_bytes,
        cores=0,
        memory_bytes=0,
        fast_bf16=has_fast_bf16(found.key),
        compiler=ASSUMED_COMPILER,
    )

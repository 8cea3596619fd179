"""What a job runs on: nodes of equal devices, from `--cluster`. Imports no torch."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from paceline.cluster.measured import MeasuredCluster, load_measured
from paceline.cluster.probe import Host
from paceline.config import nearest
from paceline.errors import UsageError
from paceline.units import parse_bytes

HERE = "here"
CPU = "cpu"
"""The device of the catalogue that is a processor: `--cluster` takes the memory and the cores of this host for it."""

SUFFIX = ".toml"
MEASURED_FILE = "cluster.toml"
"""Where `here` looks for what was measured."""

ASSUMED_COMPILER = "g++"
"""A cluster that is only described is taken to have what compiled blocks need."""

CATALOG = Path(__file__).parent / "catalog"
_PATTERN = re.compile(r"(\d+)x(\d+)x([A-Za-z0-9.-]+)(?::([A-Za-z0-9.-]+))?")


class NamedParts(NamedTuple):
    """What `NODESxDEVICESxDEVICE[:FABRIC]` names."""

    nodes: int
    devices: int
    device: str
    fabric: str | None


class Cluster(msgspec.Struct, frozen=True):
    """`nodes` nodes of `devices_per_node` devices; `host` is one of them. `measured`: what a bench found out about it."""

    text: str
    nodes: int
    devices_per_node: int
    host: Host
    measured: MeasuredCluster | None = None

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node


def parse_cluster(text: str, here: Host) -> Cluster:
    """`here`, a measured cluster's file, or `NODESxDEVICESxDEVICE[:FABRIC]` such as `1x8xa100-sxm-80g`.

    `here` takes what was measured from `cluster.toml` in the working directory, where it is of this host.

    Raises:
        UsageError: the text has another form, or names a device that the catalogue lacks; or the file is unusable.
    """
    if text == HERE:
        return Cluster(text, 1, here.default_procs, here, _measured_here(here))
    if text.endswith(SUFFIX):
        measured = load_measured(Path(text))
        return Cluster(text, measured.nodes, measured.devices_per_node, measured.host, measured)
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise UsageError(
            f"--cluster {text!r} is neither here nor NODESxDEVICESxDEVICE[:FABRIC]",
            values={"cluster": text},
            hint="For example 1x8xa100-sxm-80g, 4x8xh100-sxm:ndr400 or 2x2xcpu:100mbit; a measured cluster is a .toml file.",
        )
    named = NamedParts(int(match[1]), int(match[2]), match[3], match[4])
    if named.nodes < 1 or named.devices < 1:
        raise _no_devices(text, named)
    if named.device == CPU:
        return Cluster(text, named.nodes, named.devices, here)
    return Cluster(text, named.nodes, named.devices, _catalog_host(named.device, named.devices))


def named_parts(text: str) -> NamedParts | None:
    """The parts of `NODESxDEVICESxDEVICE[:FABRIC]`; None for `here` and for a file."""
    match = _PATTERN.fullmatch(text)
    return None if match is None else NamedParts(int(match[1]), int(match[2]), match[3], match[4])


def _no_devices(text: str, named: NamedParts) -> UsageError:
    least = f"{max(1, named.nodes)}x{max(1, named.devices)}x{named.device}" + (f":{named.fabric}" if named.fabric else "")
    return UsageError(
        f"--cluster {text!r} has {named.nodes} nodes of {named.devices} devices; nothing runs on none",
        values={"cluster": text, "nodes": named.nodes, "devices_per_node": named.devices},
        hint=f"The nearest is --cluster {least}.",
    )


def _measured_here(here: Host) -> MeasuredCluster | None:
    path = Path(MEASURED_FILE)
    if not path.is_file():
        return None
    measured = load_measured(path)
    return measured if (measured.host.name, measured.host.device_name) == (here.name, here.device_name) else None


def device_names() -> list[str]:
    """Devices of the catalogue."""
    return sorted(entry.stem for entry in CATALOG.glob("*.toml"))


def _catalog_host(name: str, devices: int) -> Host:
    if name not in device_names():
        near = nearest(name, device_names())
        raise UsageError(
            f"no device {name!r} in the catalogue",
            values={"device": name, "known": device_names()},
            hint=(f"Did you mean {near}? " if near else "") + f"Known devices: {', '.join(sorted({CPU, *device_names()}))}.",
        )
    entry = _entry(name)
    return Host(
        name=name,
        device_kind="cuda",
        devices=devices,
        device_name=entry["name"],
        device_memory_bytes=parse_bytes(entry["memory"]),
        cores=0,
        memory_bytes=0,
        fast_bf16=entry["bf16"],
        compiler=ASSUMED_COMPILER,
    )


class NodeLink(msgspec.Struct, frozen=True):
    """What joins the devices of a node: bytes/s of a device in one direction, and of them what a ring all-reduce reaches."""

    name: str
    bytes_per_second: float
    source: str
    reached_bytes_per_second: float | None = None


def node_link(device_name: str) -> NodeLink | None:
    """The link of a device by the name that it gives itself, or None where the catalogue has none."""
    key = catalogue_key(device_name)
    link = None if key is None else _entry(key).get("link")
    return None if link is None else msgspec.convert(link, NodeLink)


def catalogue_key(device_name: str) -> str | None:
    """The name in the catalogue of a device by the name that it gives itself, or None where the catalogue lacks it."""
    for name in device_names():
        entry = _entry(name)
        if device_name in (entry["name"], *entry.get("nvidia_smi", ())):
            return name
    return None


def _entry(name: str) -> dict[str, Any]:
    return tomllib.loads((CATALOG / f"{name}.toml").read_text(encoding="utf-8"))

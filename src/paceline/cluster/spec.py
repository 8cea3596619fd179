"""What a job runs on: nodes of equal devices, from `--cluster`. Imports no torch."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from paceline.cluster.measured import MeasuredCluster, load_measured
from paceline.cluster.probe import Host
from paceline.config import nearest
from paceline.errors import UsageError
from paceline.units import parse_bytes

HERE = "here"
SUFFIX = ".toml"
MEASURED_FILE = "cluster.toml"
"""Where `here` looks for what was measured."""

ASSUMED_COMPILER = "g++"
"""A cluster that is only described is taken to have what compiled blocks need."""

CATALOG = Path(__file__).parent / "catalog"
_PATTERN = re.compile(r"(\d+)x(\d+)x([A-Za-z0-9.-]+)(?::([A-Za-z0-9.-]+))?")


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
    nodes, devices, name = int(match[1]), int(match[2]), match[3]
    if nodes < 1 or devices < 1:
        raise UsageError(f"--cluster {text!r}: nodes and devices are 1 or more", values={"cluster": text})
    if name == "cpu":
        return Cluster(text, nodes, devices, here)
    return Cluster(text, nodes, devices, _catalog_host(name, devices))


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
            hint=f"Did you mean {near}?" if near else f"Known devices: cpu, {', '.join(device_names())}.",
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
    for name in device_names():
        entry = _entry(name)
        if device_name in (entry["name"], *entry.get("nvidia_smi", ())) and "link" in entry:
            return msgspec.convert(entry["link"], NodeLink)
    return None


def _entry(name: str) -> dict[str, Any]:
    return tomllib.loads((CATALOG / f"{name}.toml").read_text(encoding="utf-8"))

"""Reads the catalogue: a device or a network by its key. Imports no torch.

A device's file gives what its data sheet promises (`peak`, `memory_bytes_per_second`), what was reached of it at the best
shape (`reached`) and what is held for hours within its power (`sustained`). The curve over the size of a product follows
from these and from the seconds in which a kernel begins and ends.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from paceline.cluster.device import Device, Link
from paceline.cluster.measured import Curve
from paceline.config import nearest
from paceline.errors import UsageError
from paceline.units import parse_bytes

CATALOG = Path(__file__).parent / "catalog"
FABRICS = CATALOG / "fabrics"

EDGE_SECONDS = 4e-6
"""What a product loses between its first and its last full wave, and to its launch. Assumed alike on all devices."""

_SIZES = tuple(10**exponent for exponent in range(6, 15))
_PLAIN = re.compile(r"(\d+)(mbit|gbit)")
_SHARED = re.compile(r"(.+?)x(\d+)")
_PLAIN_REACHED = 0.8
_PLAIN_LATENCY = 50e-6


def device_names() -> list[str]:
    """Keys of all devices, sorted."""
    return sorted(path.stem for path in CATALOG.glob("*.toml"))


def fabric_names() -> list[str]:
    """Keys of all networks, sorted."""
    return sorted(path.stem for path in FABRICS.glob("*.toml"))


@cache
def device(key: str) -> Device:
    """A device of the catalogue.

    Raises:
        UsageError: there is none; names the nearest ones.
    """
    if key not in device_names():
        raise _unknown("device", key, device_names())
    entry = _read(CATALOG / f"{key}.toml")
    reached, sustained = entry["reached"], entry.get("sustained", {})
    held = {kind: min(share, sustained.get(kind, share)) for kind, share in reached.items() if kind != "source"}
    return Device(
        key=key,
        name=entry["name"],
        kind=entry.get("kind", "cuda"),
        memory_bytes=parse_bytes(entry["memory"]),
        peak=entry["peak"],
        memory_bytes_per_second=entry["memory_bytes_per_second"],
        memory_reached=entry["memory_reached"],
        launch_seconds=entry.get("launch_seconds", 5e-6),
        curves=tuple(_curve(kind, peak * held[kind]) for kind, peak in entry["peak"].items() if kind in held),
        link=_link(entry["link"]) if "link" in entry else None,
        units=entry.get("units", 0),
        watts=entry.get("watts"),
        year=entry.get("year"),
        sources=(entry["source"], reached["source"], *([sustained["source"]] if sustained else [])),
    )


def fabric(key: str, devices_per_node: int = 8) -> Link:
    """A network of the catalogue: `ndr400`, one NIC a device; `eth100x1`, one NIC a node; `100mbit`, plain Ethernet of
    that rate, one NIC a node.

    Raises:
        UsageError: there is none; names the nearest ones.
    """
    plain = _PLAIN.fullmatch(key)
    if plain is not None:
        rate = int(plain[1]) * (1e6 if plain[2] == "mbit" else 1e9) / 8
        return Link(key, rate / devices_per_node, _PLAIN_REACHED, _PLAIN_LATENCY, f"the rate that {key} names")
    names = fabric_names()
    shared = _SHARED.fullmatch(key)
    if key not in names and shared is not None and shared[1] in names:
        whole, nics = fabric(shared[1]), int(shared[2])
        rate = whole.bytes_per_second * nics / devices_per_node
        return msgspec.structs.replace(whole, name=f"{whole.name}, {nics} a node", bytes_per_second=rate)
    if key not in names:
        raise _unknown("fabric", key, names)
    return msgspec.convert(_read(FABRICS / f"{key}.toml"), Link)


def catalogue_key(device_name: str) -> str | None:
    """The key of a device by the name that it gives itself, or None where the catalogue lacks it."""
    for key in device_names():
        entry = _read(CATALOG / f"{key}.toml")
        if device_name in (entry["name"], *entry.get("nvidia_smi", ())):
            return key
    return None


def node_link(device_name: str) -> Link | None:
    """The link of a device by the name that it gives itself, or None where the catalogue has none."""
    key = catalogue_key(device_name)
    return None if key is None else device(key).link


def has_fast_bf16(key: str) -> bool:
    """Whether a device of the catalogue has instructions of its own for bf16 products."""
    return bool(_read(CATALOG / f"{key}.toml")["bf16"])


def _curve(kind: str, best: float) -> Curve:
    rates = tuple(best * size / (size + best * EDGE_SECONDS) for size in _SIZES)
    return Curve("matmul", kind, _SIZES, rates, (0.0,) * len(_SIZES))


def _link(entry: dict[str, Any]) -> Link:
    return Link(
        name=entry["name"],
        bytes_per_second=entry["bytes_per_second"],
        reached=entry["reached_bytes_per_second"] / entry["bytes_per_second"],
        latency_seconds=entry["latency_seconds"],
        source=entry["source"],
        reduces=entry.get("reduces", {}),
    )


def _unknown(what: str, key: str, names: Iterable[str]) -> UsageError:
    known = list(names)
    near = nearest(key.lower(), known)
    alike = [name for name in known if name.startswith(key.lower()[:4])]
    close = list(dict.fromkeys([*([near] if near else []), *alike]))[:4]
    return UsageError(
        f"no {what} {key!r} in the catalogue",
        key="--cluster",
        values={what: key, "known": known},
        hint=f"Did you mean {' or '.join(close)}?" if close else f"Known: {', '.join(known)}.",
    )


@cache
def _read(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))

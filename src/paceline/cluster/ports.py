"""RDMA ports of this host (InfiniBand and RoCE), as the kernel lists them. Imports no torch."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

FOLDER = Path("/sys/class/infiniband")
BITS = 8


class RdmaPort(msgspec.Struct, frozen=True):
    """A port: `bytes_per_second` in one direction as the kernel states its rate; `link` is `InfiniBand` or `Ethernet`."""

    device: str
    port: int
    active: bool
    bytes_per_second: float
    link: str

    @property
    def name(self) -> str:
        return f"{self.device}:{self.port}"


def rdma_ports(folder: Path = FOLDER) -> list[RdmaPort]:
    """All ports; none on a host without such devices."""
    found = [_port(place) for place in sorted(folder.glob("*/ports/*"))]
    return [port for port in found if port is not None]


def _port(place: Path) -> RdmaPort | None:
    try:
        state, rate = (place / "state").read_text(), (place / "rate").read_text()
        link = (place / "link_layer").read_text().strip()
    except OSError:
        return None
    number = re.match(r"\s*([\d.]+)\s*Gb/sec", rate)
    return RdmaPort(
        device=place.parent.parent.name, port=int(place.name), active="ACTIVE" in state,
        bytes_per_second=float(number[1]) * 1e9 / BITS if number else 0.0, link=link,
    )  # fmt: skip

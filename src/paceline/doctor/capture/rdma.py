"""RDMA devices as the kernel lists them: ports, rates, GIDs, error counts; and what stands between them and GPUs."""

from __future__ import annotations

import re
import struct
from pathlib import Path

from paceline.doctor.capture import files
from paceline.doctor.host import Gid, RdmaPort

DEVICES = Path("/sys/class/infiniband")
COUNTERS = ("symbol_error", "link_downed", "link_error_recovery", "port_rcv_errors", "local_link_integrity_errors")
NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
BRIDGE_CLASS = "0x0604"
_ACS = 0x000D
_REDIRECTS = 0b11100
"""Request redirect, completion redirect, upstream forwarding: peer traffic then goes up to the root."""


def ports() -> tuple[RdmaPort, ...]:
    """Ports of all RDMA devices; none where there is no device."""
    return tuple(_port(device, port) for device in files.folders(DEVICES) for port in files.folders(device / "ports"))


def _port(device: Path, port: Path) -> RdmaPort:
    state = files.text(port / "state").partition(":")[2].strip()
    rate = _rate(files.text(port / "rate"))
    interfaces = [f.name for f in files.folders(device / "device/net")]
    gids = tuple(_gids(port))
    node = files.number(device / "device/numa_node")
    return RdmaPort(
        device=device.name,
        port=int(port.name),
        active=state == "ACTIVE",
        state=state,
        link=files.text(port / "link_layer"),
        rate=rate,
        rate_max=rate,
        driver=_link_name(device / "device/driver"),
        interface=next((g.interface for g in gids if g.interface), interfaces[0] if interfaces else ""),
        node=node if node is not None and node >= 0 else None,
        gids=gids,
        counters={name: value for name in COUNTERS if (value := files.number(port / "counters" / name))},
    )


def _rate(text: str) -> float:
    """Bits per second of `400 Gb/sec (4X NDR)`."""
    match = re.match(r"([0-9.]+) *Gb", text)
    return float(match[1]) * 1e9 if match else 0.0


def _gids(port: Path) -> list[Gid]:
    found = []
    for entry in sorted(files.folders(port / "gids"), key=lambda path: int(path.name)):
        gid = files.text(entry)
        if gid and gid != NO_GID:
            attributes = port / "gid_attrs"
            kind, interface = (files.text(attributes / part / entry.name) for part in ("types", "ndevs"))
            found.append(Gid(int(entry.name), gid, kind, interface))
    return found


def _link_name(path: Path) -> str:
    try:
        return path.resolve(strict=True).name
    except OSError:
        return ""


def peer_memory() -> bool:
    """Whether RDMA devices may read GPU memory: a peer-memory module, or a driver that exports DMA buffers.

    Raises:
        NotThere: there is no NVIDIA driver to ask about.
    """
    driver = files.text("/proc/driver/nvidia/version")
    if not driver:
        raise files.NotThere("there is no NVIDIA driver")
    modules = [Path("/sys/module/nvidia_peermem"), Path("/sys/module/nv_peer_mem")]
    return any(module.exists() for module in modules) or "Open Kernel Module" in driver


def bridges_checked() -> dict[str, bool]:
    """PCI bridges and whether access control sends traffic between devices below them through the root.

    Raises:
        NotThere: extended configuration space can only be read by root.
    """
    bridges = [f for f in files.folders("/sys/bus/pci/devices") if files.text(f / "class").startswith(BRIDGE_CLASS)]
    found: dict[str, bool] = {}
    for bridge in bridges:
        space = (bridge / "config").read_bytes()
        if len(space) < 4096:
            raise files.NotThere("extended PCI configuration space can only be read by root")
        control = _acs_control(space)
        if control is not None:
            found[bridge.name] = bool(control & _REDIRECTS)
    return found


def _acs_control(space: bytes) -> int | None:
    """The control register of the access control services capability, or None where there is none."""
    offset = 0x100
    while offset:
        header = struct.unpack_from("<I", space, offset)[0]
        if header & 0xFFFF == _ACS:
            return int(struct.unpack_from("<H", space, offset + 6)[0])
        following = header >> 20
        offset = following if following > offset else 0
    return None

"""Over what NCCL sends, from what it logs at its start. No torch.

NCCL says one line per communicator, `NCCL INFO Using network IB` (or Socket, or a plugin's name), and per channel over what
it goes, `via P2P/CUMEM` or `via NET/Socket/0` (NCCL 2.20 and later).
"""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from paceline.bench.remarks import Remark
from paceline.bench.rows import GB, Row
from paceline.cluster.measured import ACROSS_NODES
from paceline.cluster.ports import RdmaPort
from paceline.units import format_bytes

SOCKET = "Socket"
LOW_SHARE = 0.7
_NETWORK = re.compile(r"NCCL INFO (?:\S+ : )?Using network (\S+)")
_CHANNEL = re.compile(r"\bvia (P2P|SHM|NET)(?:/(\w+))?")


class Transport(msgspec.Struct, frozen=True):
    """`network` as NCCL calls what it uses between nodes; `channels` counts channels by what they go over."""

    network: str | None = None
    channels: dict[str, int] = {}


def transport_of(log: str) -> Transport:
    """What a log of NCCL_DEBUG=INFO says; the last network, since a fallback is logged after what failed."""
    networks = _NETWORK.findall(log)
    ways = Counter(f"NET/{kind}" if way == "NET" and kind else way for way, kind in _CHANNEL.findall(log))
    return Transport(networks[-1] if networks else None, dict(ways))


def log_to_file(env: MutableMapping[str, str]) -> Path | None:
    """Have NCCL log into a file of this process's; None where the user has NCCL log already. Before NCCL's start."""
    if "NCCL_DEBUG" in env or "NCCL_DEBUG_FILE" in env:
        return None
    path = Path(tempfile.gettempdir()) / f"paceline-nccl-{os.getpid()}.log"
    env.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET,P2P,SHM", NCCL_DEBUG_FILE=str(path))
    return path


def read_log(path: Path | None) -> Transport | None:
    """What was logged, and the file removed; None where nothing was."""
    if path is None or not path.exists():
        return None
    text = path.read_text(encoding="utf-8", errors="replace")
    path.unlink(missing_ok=True)
    return transport_of(text)


def about_transport(transport: Transport | None, ports: Sequence[RdmaPort], rows: Sequence[Row]) -> list[Remark]:
    """Which network carried the data between nodes, whether a faster one was left idle, and its share of the ports' rate."""
    across = [row for row in rows if (row.collective, row.tier) == ("all_reduce", ACROSS_NODES)]
    if transport is None or transport.network is None or not across:
        return []
    active = [port for port in ports if port.active]
    listed = ", ".join(f"{port.name} ({port.link}, {port.bytes_per_second / GB:.0f} GB/s)" for port in active)
    values: dict[str, Any] = {"network": transport.network, "channels": transport.channels,
                              "ports": [port.name for port in active]}  # fmt: skip
    if transport.network == SOCKET and active:
        message = f"NCCL sends between nodes over IP sockets, and {listed} is active: the fast fabric is not used"
        return [Remark("slow_transport", f"{message}; see paceline doctor for the variable at fault", True, values)]
    found = [Remark("transport", f"NCCL sends between nodes over {transport.network}", False, values)]
    if active and transport.network != SOCKET:
        found.append(_share(max(across, key=lambda row: row.bus_bandwidth), active, values))
    return found


def _share(row: Row, active: Sequence[RdmaPort], values: dict[str, Any]) -> Remark:
    """Bus bandwidth over several nodes is bounded by what all ports of a node carry together."""
    rated = sum(port.bytes_per_second for port in active) / GB
    share = min(1.0, row.bus_bandwidth / rated)
    message = (
        f"all_reduce of {format_bytes(row.size_bytes)} between nodes: {row.bus_bandwidth:.1f} GB/s is {share:.0%} of the "
        f"{rated:.0f} GB/s of this node's {len(active)} active port{'s' * (len(active) > 1)}"
    )
    return Remark("share_of_ports", message, share < LOW_SHARE, {**values, "share": share, "rated": rated})

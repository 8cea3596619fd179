"""Where a rank is: its host, and the node that it shares with ranks which it reaches without a network. No torch."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Place(NamedTuple):
    """A rank's place. `host` names the machine, `node` the part of it that shares one network stack."""

    rank: int
    host: str
    node: str
    pid: int
    device: str

    @classmethod
    def here(cls, rank: int, device: str = "cpu") -> Place:
        """This process. Two network namespaces of one host are two nodes: what goes between them goes over a link."""
        host = socket.gethostname()
        return cls(rank, host, f"{host}{_namespace()}", os.getpid(), device)


def node_names(places: Sequence[Place]) -> list[str]:
    """The nodes, in the order of their first ranks."""
    return list(dict.fromkeys(place.node for place in places))


def _namespace() -> str:
    """The network namespace where this process is in another one than its host's first process."""
    try:
        own, first = (str(Path(f"/proc/{pid}/ns/net").readlink()) for pid in ("self", "1"))
    except OSError:
        return ""
    return "" if own == first else f"#{own.strip('net:[]')}"

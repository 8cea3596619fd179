"""What this process's connections have sent, and for how long they were busy with it, from the kernel's own counters.

`bytes / busy seconds` is the rate of a link while there is something to send: a slow one is told from one that has little
to carry without a byte of traffic more. Linux; elsewhere there is nothing to tell. No torch.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from typing import NamedTuple

_BYTES_ACKED_AT, _BUSY_TIME_AT, _LONG_ENOUGH = 120, 168, 176
"""Offsets of `tcpi_bytes_acked` and `tcpi_busy_time` (microseconds) in `struct tcp_info` of linux/tcp.h."""
_INFO_BYTES = 256


class Sent(NamedTuple):
    """Over all connections to one address since they were made: bytes acknowledged, and seconds of being busy."""

    bytes: int
    busy_seconds: float


class Links:
    """This process's connections to other addresses and ranks."""

    def __init__(self) -> None:
        self._before: dict[str, Sent] = {}

    def since_last(self) -> tuple[str, dict[str, list[float]]]:
        """This end's address, and what was sent to each other end since the last call: bytes and busy seconds."""
        own, now = connections()
        told: dict[str, list[float]] = {}
        for peer, sent in now.items():
            before = self._before.get(peer, Sent(0, 0.0))
            if sent.bytes >= before.bytes and sent.busy_seconds > before.busy_seconds:
                told[peer] = [float(sent.bytes - before.bytes), sent.busy_seconds - before.busy_seconds]
        self._before = now
        return own, told


def connections() -> tuple[str, dict[str, Sent]]:
    """This process's own address in its connections, and what they have sent, by the other end's address."""
    own = ""
    found: dict[str, Sent] = {}
    for handle in _sockets():
        with contextlib.suppress(OSError, struct.error), socket.socket(fileno=os.dup(handle)) as one:
            if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
                continue
            peer = _plain(one.getpeername()[0])
            info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
            if len(info) < _LONG_ENOUGH:
                continue
            (acked,) = struct.unpack_from("=Q", info, _BYTES_ACKED_AT)
            (busy,) = struct.unpack_from("=Q", info, _BUSY_TIME_AT)
            before = found.get(peer, Sent(0, 0.0))
            found[peer] = Sent(before.bytes + acked, before.busy_seconds + busy / 1e6)
            own = _plain(one.getsockname()[0])
    return own, found


def _sockets() -> list[int]:
    handles = []
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):  # noqa: PTH115
                    handles.append(int(name))
    return handles


def _plain(address: str) -> str:
    """An IPv4 address that is written as IPv6."""
    return address.removeprefix("::ffff:")

"""Passes frames between two devices of this namespace, later and not all of them: what `tc netem` would do.

    python middlebox.py DEVICE DEVICE DELAY_SECONDS LOSS SEED

Delay and loss act on frames, so that TCP itself meets them: a proxy of TCP connections could only pretend, and collectives
connect to the addresses that the ranks tell each other, where no proxy can stand between. Standard library only.
"""

from __future__ import annotations

import random
import select
import socket
import sys
import time
from collections import deque

ETH_P_ALL = 3
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
SO_RCVBUFFORCE = 33
VNET_HEADER_BYTES = 10
"""Says how a frame larger than the MTU is to be cut, and where its checksum goes; passed on as it came."""

LARGEST_FRAME_BYTES = 70_000
SEGMENT_BYTES = 1500


def main() -> None:
    names, delay, loss = sys.argv[1:3], float(sys.argv[3]), float(sys.argv[4])
    draw = random.Random(int(sys.argv[5]))
    first, second = (_open(name) for name in names)
    other = {first: second, second: first}
    waiting: deque[tuple[float, socket.socket, bytes]] = deque()
    print("ready", flush=True)
    while True:
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for ready in select.select([first, second], [], [], pause)[0]:
            frame = ready.recv(LARGEST_FRAME_BYTES)
            if not _lost(len(frame), loss, draw):
                waiting.append((time.monotonic() + delay, other[ready], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, out, frame = waiting.popleft()
            try:
                out.send(frame)
            except OSError:
                # A full queue or a link that is down loses the frame, as a switch does.
                continue


def _open(name: str) -> socket.socket:
    # Without a protocol it hears nothing until it is bound to its device.
    device = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    device.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    device.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    device.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 24)
    device.bind((name, ETH_P_ALL))
    return device


def _lost(size: int, loss: float, draw: random.Random) -> bool:
    """A frame that will be cut into several is lost as if each of these had its own chance."""
    segments = max(1, round((size - VNET_HEADER_BYTES) / SEGMENT_BYTES))
    return loss > 0 and draw.random() > (1.0 - loss) ** segments


if __name__ == "__main__":
    main()

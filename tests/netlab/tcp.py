"""One TCP connection at full speed. Standard library only.

python tcp.py take ADDRESS BYTES        listens, prints `ready`, then the bytes per second of what came
python tcp.py give ADDRESS BYTES
"""

from __future__ import annotations

import socket
import sys
import time

PORT = 29500
SETTLE = 0.2
"""Share of the bytes that is not counted, while the connection finds its rate."""


def take(address: str, size: int) -> float:
    """Bytes per second between the arrival of the first fifth and of the last byte."""
    with socket.create_server((address, PORT)) as server:
        print("ready", flush=True)
        connection, _ = server.accept()
        buffer = bytearray(1 << 16)
        came, began, before = 0, 0.0, 0
        while came < size:
            came += connection.recv_into(buffer)
            if not began and came >= SETTLE * size:
                began, before = time.monotonic(), came
        return (came - before) / (time.monotonic() - began)


def give(address: str, size: int) -> None:
    """Send `size` bytes."""
    with socket.create_connection((address, PORT)) as connection:
        connection.sendall(bytes(size))
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)


if __name__ == "__main__":
    if sys.argv[1] == "take":
        print(take(sys.argv[2], int(sys.argv[3])), flush=True)
    else:
        give(sys.argv[2], int(sys.argv[3]))

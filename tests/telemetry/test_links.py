"""The kernel's counters of this process's own connections, over the loopback."""

from __future__ import annotations

import socket
import sys
import threading

import pytest

from paceline.telemetry.links import Links

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the counters are Linux's")

SIZE = 128 * 2**20
"""The kernel counts busy time in ticks of some milliseconds."""


def test_what_was_sent_since_the_last_look_is_counted() -> None:
    with socket.create_server(("127.0.0.2", 0)) as server:
        sending = socket.create_connection(server.getsockname(), source_address=("127.0.0.3", 0))
        receiving, _ = server.accept()
        with sending, receiving:
            links = Links()
            links.since_last()
            reader = threading.Thread(target=_read, args=(receiving,))
            reader.start()
            sending.sendall(bytes(SIZE))
            reader.join(10.0)
            assert not reader.is_alive()
            _, sent = links.since_last()
            amount, busy = sent["127.0.0.2"]
            assert amount == pytest.approx(SIZE, rel=0.01) and 0.0 < busy < 10.0
            assert "127.0.0.3" not in sent  # nothing was sent the other way
            assert links.since_last()[1].get("127.0.0.2") is None


def _read(receiving: socket.socket) -> None:
    left = SIZE
    while left:
        left -= len(receiving.recv(2**20))

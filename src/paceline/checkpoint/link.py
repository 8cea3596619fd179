"""A stream of JSON lines between a rank and its host's writer, and the descriptors that travel with them. No torch.

Receiving never blocks. Sending does, while the other side has not read what was sent before.
"""

from __future__ import annotations

import array
import contextlib
import select
import socket
import time
from typing import Generic, TypeVar

import msgspec

from paceline.checkpoint.messages import FromRank, FromWriter

Received = TypeVar("Received")
RECEIVE_BYTES = 2**18
_DESCRIPTORS = 4


class Closed(ConnectionError):
    """The other side is gone."""


class Link(Generic[Received]):
    """One side of a connection.

    Attributes:
        descriptors: that came and nobody has taken yet.
        closed: the other side is gone, and all that it had said before was handed out.
    """

    def __init__(self, connection: socket.socket, decoder: msgspec.json.Decoder[Received]) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.closed = False
        self.descriptors: list[int] = []
        self._decoder = decoder
        self._encoder = msgspec.json.Encoder()
        self._rest = b""

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, message: msgspec.Struct, timeout: float, descriptor: int | None = None) -> None:
        """Send a message, and a descriptor with it.

        Raises:
            Closed: the other side is gone, or took nothing for `timeout` seconds.
        """
        view = memoryview(self._encoder.encode(message) + b"\n")
        extra = (
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))] if descriptor is not None else []
        )
        deadline = time.monotonic() + timeout
        try:
            while view:
                try:
                    view, extra = view[self.connection.sendmsg([view], extra) :], []
                except BlockingIOError:
                    self._await_room(deadline)
        except OSError as error:
            # What the other side had said before it went is still to be read: `receive` finds the end.
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
            raise Closed(str(error)) from None

    def receive(self) -> list[Received]:
        """The messages that have come since the last call."""
        messages: list[Received] = []
        while not self.closed:
            try:
                data, descriptors, _, _ = socket.recv_fds(self.connection, RECEIVE_BYTES, _DESCRIPTORS)
            except BlockingIOError:
                break
            except OSError:
                data, descriptors = b"", []
            self.descriptors += descriptors
            self.closed = not data
            *lines, self._rest = (self._rest + data).split(b"\n")
            messages += [self._decoder.decode(line) for line in lines]
        return messages

    def wait(self, seconds: float) -> None:
        """Until something has come or the time is over."""
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        poll.poll(max(0.0, seconds) * 1000)

    def close(self) -> None:
        self.closed = True
        self.connection.close()

    def _await_room(self, deadline: float) -> None:
        poll = select.poll()
        poll.register(self.connection, select.POLLOUT)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError("the other side does not read")


def to_writer(connection: socket.socket) -> Link[FromWriter]:
    """A rank's side."""
    return Link(connection, msgspec.json.Decoder(FromWriter))


def to_rank(connection: socket.socket) -> Link[FromRank]:
    """The writer's side."""
    return Link(connection, msgspec.json.Decoder(FromRank))

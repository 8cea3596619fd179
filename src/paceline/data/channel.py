"""Messages between a rank and a loader worker, small and fast: a fixed head and some bytes, over a socket pair.

Imports no numpy and no torch. The head is kind, step, buffer and the length of what follows.
"""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

SETUP, READY, MAKE, MADE, SENT, FAILED = range(6)
_HEAD = struct.Struct("<Bqqq")
_RECEIVE_BYTES = 1 << 14  # a larger buffer would be mapped anew for every message


class Message(NamedTuple):
    """`kind` is one of the constants above; `buffer` and `step` are -1 where they mean nothing."""

    kind: int
    step: int
    buffer: int
    payload: bytes


class Channel:
    """One end of the socket pair."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._received = bytearray()

    def fileno(self) -> int:
        """For `poll`."""
        return self._socket.fileno()

    def send(self, kind: int, step: int = -1, buffer: int = -1, payload: bytes = b"") -> None:
        """Send one message. Raises OSError where the other end is gone."""
        self._socket.sendall(_HEAD.pack(kind, step, buffer, len(payload)) + payload)

    def receive(self) -> list[Message]:
        """The messages that have arrived, without waiting for any.

        Raises:
            EOFError: the other end is closed.
        """
        try:
            data = self._read(socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        if not self._received and len(data) >= _HEAD.size:
            kind, step, buffer, length = _HEAD.unpack_from(data)
            if len(data) == _HEAD.size + length:  # the usual case: one whole message
                return [Message(kind, step, buffer, data[_HEAD.size :])]
        self._received += data
        return self._complete()

    def wait_for(self) -> Message:
        """The next message; for an end that gets one at a time."""
        while not (messages := self._complete(1)):
            self._received += self._read()
        return messages[0]

    def close(self) -> None:
        """Close this end; the other one then reads an end of file."""
        self._socket.close()

    def _read(self, flags: int = 0) -> bytes:
        try:
            data = self._socket.recv(_RECEIVE_BYTES, flags)
        except ConnectionError:
            data = b""
        if not data:
            raise EOFError
        return data

    def _complete(self, limit: int | None = None) -> list[Message]:
        messages: list[Message] = []
        held, start = self._received, 0
        while len(held) - start >= _HEAD.size and len(messages) != limit:
            kind, step, buffer, length = _HEAD.unpack_from(held, start)
            stop = start + _HEAD.size + length
            if stop > len(held):
                break
            messages.append(Message(kind, step, buffer, bytes(held[start + _HEAD.size : stop])))
            start = stop
        del held[:start]
        return messages

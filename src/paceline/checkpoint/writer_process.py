"""A rank's connection to the writer process of its host. Local rank 0 starts the process, the others are told where it is."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import msgspec

from paceline.checkpoint import writer_lock
from paceline.checkpoint.exchange import KeyValueStore, await_key
from paceline.checkpoint.link import Link, to_writer
from paceline.checkpoint.messages import FromWriter
from paceline.workers.signals import held_back

COMMAND = (sys.executable, "-m", "paceline.checkpoint.writer")
BACKLOG = 128


class Address(msgspec.Struct, frozen=True):
    """Where a writer listens, and the first save that it serves. NUL at the beginning: no file; empty: it did not start."""

    name: str
    first_save: int


class WriterProcess:
    """The writer that this rank started, for the place and the number of this host.

    Attributes:
        link: this rank's connection to it.
        address: where the host's other ranks find it.
    """

    def __init__(self, command: Sequence[str], place: str, node: int, first_save: int) -> None:
        listener, name = _listen()
        ours, theirs = socket.socketpair()
        lock = writer_lock.take_now(place, node)
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        with listener, theirs:
            given = {"--listen": listener.fileno(), "--first": theirs.fileno(), "--lock": lock}
            descriptors = {name: descriptor for name, descriptor in given.items() if descriptor is not None}
            words = [str(word) for pair in descriptors.items() for word in pair]
            with held_back():
                self.process = subprocess.Popen(
                    [*command, *words, "--cpus-of", str(os.getppid())],
                    stdin=subprocess.DEVNULL,
                    stdout=self._log,
                    stderr=self._log,
                    pass_fds=tuple(descriptors.values()),
                    # What ends the ranks must not end the save: a session of its own hears no signal of theirs.
                    start_new_session=True,
                )
        if lock is not None:
            writer_lock.name_holder(lock, self.process.pid)
            os.close(lock)
        self.link: Link[FromWriter] = to_writer(ours)
        self.address = Address(name, first_save)

    def end(self, timeout: float) -> str:
        """How it ended, and what it printed last."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return "closed its connection and runs on"
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f"{how}: {lines[-1]}" if lines else how

    def close(self, timeout: float) -> None:
        """Close the connection and reap the process, which ends once it has nothing left to write."""
        self.link.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout)
        self._log.close()
        if not self.address.name.startswith("\0"):
            with contextlib.suppress(OSError):
                Path(self.address.name).unlink()
                Path(self.address.name).parent.rmdir()


def publish(store: KeyValueStore, key: str, address: Address) -> None:
    store.set(key, msgspec.json.encode(address))


def find(store: KeyValueStore, key: str, timeout: float) -> Address:
    """What was published at `key`.

    Raises:
        Stalled: local rank 0 did not start a writer in time.
    """
    text = await_key(store, key, timeout, "this host's local rank 0 to start the checkpoint writer")
    return msgspec.json.decode(text, type=Address)


def connect(address: Address) -> Link[FromWriter]:
    """A connection to the writer there.

    Raises:
        OSError: it is gone already, or could not be started.
    """
    if not address.name:
        raise ConnectionRefusedError("local rank 0 could not start the checkpoint writer")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(address.name)
    except OSError:
        connection.close()
        raise
    return to_writer(connection)


def _listen() -> tuple[socket.socket, str]:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if sys.platform == "linux":
        name = f"\0paceline-writer-{os.getpid()}-{os.urandom(8).hex()}"
    else:
        name = str(Path(tempfile.mkdtemp(prefix="paceline-")) / "writer")
    listener.bind(name)
    listener.listen(BACKLOG)
    return listener, name

"""A rank's side of its host's writer: connect, notice that it is gone, connect to the next one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from paceline.checkpoint.exchange import KeyValueStore
from paceline.checkpoint.link import Closed, Link
from paceline.checkpoint.messages import FromWriter
from paceline.checkpoint.writer_process import Address, WriterProcess, connect, find, publish

LOOK_SECONDS = 0.1
"""Between two looks at the store for a writer that follows one that died."""


class WorldLike(Protocol):
    """This rank's place in its run. The ranks of a host follow each other; `store` is the run's."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def local_world_size(self) -> int: ...
    @property
    def node_rank(self) -> int: ...
    @property
    def store(self) -> Any: ...


class HostLink:
    """The connection to the writer, over all the writers that there are in turn: a new one follows one that died.

    Args:
        command: starts a writer; local rank 0 does.
        greet: says what a writer must know first.
        timeout: seconds for local rank 0 to start one, and for it to read what is sent.
    """

    def __init__(
        self,
        world: WorldLike,
        store: KeyValueStore,
        prefix: str,
        place: str,
        command: Sequence[str],
        greet: Callable[[], list[tuple[msgspec.Struct, int | None]]],
        timeout: float,
    ) -> None:
        self._place = place
        self._node = world.node_rank
        self._starts = world.local_rank == 0
        self._store = store
        self._prefix = f"{prefix}/writer/{world.node_rank}"
        self._command = tuple(command)
        self._greet = greet
        self._timeout = timeout
        self._link: Link[FromWriter] | None = None
        self._process: WriterProcess | None = None
        self._generation = 0
        self._first_save = 0
        self._looked = 0.0

    @property
    def is_open(self) -> bool:
        return self._link is not None and not self._link.closed

    def open(self, number: int) -> None:
        """Have a connection: to the writer there is, or to a new one that serves save `number` and those after it.

        Raises:
            OSError: the new writer could not be started, or is gone already.
            Stalled: local rank 0 started none in time.
        """
        while not self.is_open:
            self.close()
            self._generation += 1
            try:
                self._start(number) if self._starts else self._connect()
                for message, descriptor in self._greet():
                    self.send(message, descriptor)
            except OSError:
                # One that served earlier saves only has a successor; the one that this save waits for has not.
                if self._first_save >= number:
                    raise

    def reopen(self, number: int) -> bool:
        """Connect to a writer that has followed the one that died, if there is one and it serves save `number`."""
        key = f"{self._prefix}/{self._generation + 1}"
        now = time.monotonic()
        if self._starts or self.is_open or now - self._looked < LOOK_SECONDS:
            return False
        self._looked = now
        if not self._store.check([key]):
            return False
        try:
            self.open(number)
        except OSError:
            return False
        return self._first_save <= number

    def send(self, message: msgspec.Struct, descriptor: int | None = None) -> None:
        """Raises Closed where the writer is gone."""
        if self._link is None:
            raise Closed("there is no writer")
        self._link.send(message, self._timeout, descriptor)

    def receive(self) -> list[FromWriter]:
        return [] if self._link is None else self._link.receive()

    def wait(self, seconds: float) -> None:
        """Until the writer has said something, or the time is over."""
        if self._link is None:
            time.sleep(seconds)
        else:
            self._link.wait(seconds)

    def end(self) -> str | None:
        """How the writer ended, once, after it did."""
        if self._link is None or not self._link.closed:
            return None
        how = "closed its connection" if self._process is None else self._process.end(timeout=2.0)
        self.close()
        return how

    def close(self, timeout: float = 0.1) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._process is not None:
            self._process.close(timeout)
            self._process = None

    def _start(self, number: int) -> None:
        self._first_save = number
        key = f"{self._prefix}/{self._generation}"
        try:
            self._process = WriterProcess(self._command, self._place, self._node, number)
        except OSError:
            publish(self._store, key, Address("", number))  # so that nobody waits for it
            raise
        self._link = self._process.link
        publish(self._store, key, self._process.address)

    def _connect(self) -> None:
        address = find(self._store, f"{self._prefix}/{self._generation}", self._timeout)
        self._first_save = address.first_save
        self._link = connect(address)

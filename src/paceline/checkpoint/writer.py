"""The writer process: one per host, it turns staged state into files while training goes on. No torch.

    python -m paceline.checkpoint.writer --listen FD --first FD

Local rank 0 starts it with a listening socket and with its own connection; the others connect. Each hands over its staging
buffer once; a save is then a short message. The writer ends when its ranks are gone and what they had staged is written.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import queue
import selectors
import signal
import socket
import struct
import threading
import time

from paceline.checkpoint import writer_lock
from paceline.checkpoint.host_save import Buffer, EndedElsewhere, HostSave
from paceline.checkpoint.inbox import Inbox
from paceline.checkpoint.link import Closed, Link, to_rank
from paceline.checkpoint.messages import Cancel, Done, Event, FromRank, FromWriter, Hello, NextCame, SetUp, Staged
from paceline.errors import from_record
from paceline.workers.signals import disregard

SEND_SECONDS = 5.0


class Writer:
    """Listens to the ranks in the calling thread and saves in another one."""

    def __init__(self, listener: socket.socket, first: socket.socket, lock: int | None) -> None:
        self._listener = listener
        self._set_up: SetUp | None = None
        self._lock = lock
        self._is_alone = False
        self._links: dict[Link[FromRank], int | None] = {}
        self._buffers: dict[int, Buffer] = {}
        self._gone: set[int] = set()
        self._saves: dict[int, HostSave] = {}
        self._jobs: queue.SimpleQueue[HostSave | None] = queue.SimpleQueue()
        self._unfinished = 0
        self._sending = threading.Lock()
        self._woken, self._wake = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._woken, selectors.EVENT_READ, self._woken_up)
        self._first = self._add(first)

    def serve(self) -> None:
        """Until all ranks are gone and nothing is left to write."""
        worker = threading.Thread(target=self._work, name="saves")
        worker.start()
        while self._set_up is None and self._links:
            self._first.wait(1.0)
            self._hear(self._first)
        while self._links or self._unfinished:
            for key, _ in self._selector.select():
                key.data()
        self._jobs.put(None)
        worker.join()

    # ---- ranks

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        if _same_user(connection):
            self._add(connection)
        else:
            connection.close()

    def _add(self, connection: socket.socket) -> Link[FromRank]:
        link = to_rank(connection)
        self._links[link] = None
        self._selector.register(link, selectors.EVENT_READ, lambda: self._hear(link))
        return link

    def _hear(self, link: Link[FromRank]) -> None:
        for message in link.receive():
            self._take(link, message)
        if link.closed:
            self._drop(link)

    def _drop(self, link: Link[FromRank]) -> None:
        self._selector.unregister(link)
        with self._sending:
            rank = self._links.pop(link)
            link.close()
        if rank is not None:
            self._gone.add(rank)
            for save in self._saves.values():
                save.inbox.lost(rank)

    def _take(self, link: Link[FromRank], message: FromRank) -> None:
        rank = self._links[link]
        match message:
            case SetUp():
                self._set_up = message
            case Hello():
                self._links[link] = message.rank
                self._gone.discard(message.rank)
                self._buffers[message.rank] = _mapped(message, link.descriptors)
            case Staged() if rank is not None:
                self._staged(link, rank, message)
            case NextCame() if message.number in self._saves:
                self._saves[message.number].inbox.next_came(message.result)
            case Cancel() if message.number in self._saves:
                problem = EndedElsewhere() if message.error is None else from_record(message.error)
                self._saves[message.number].inbox.stop(problem)
            case _:
                pass

    def _staged(self, link: Link[FromRank], rank: int, message: Staged) -> None:
        save = self._saves.get(message.number) or self._begin(message)
        if save.result is not None:  # it failed before this rank came
            with self._sending:
                _send(link, save.result)
        elif save.inbox.staged(rank, message):
            seconds = time.monotonic() - save.inbox.began
            self._tell(Event(state="staged", step=message.step, number=message.number, seconds=seconds))

    def _begin(self, message: Staged) -> HostSave:
        if self._set_up is None:
            raise RuntimeError("a rank staged before local rank 0 said what this is")
        inbox = Inbox(message.number, message.step, self._set_up.ranks, self._set_up.timeout_seconds)
        for rank in self._gone:
            inbox.lost(rank)
        save = HostSave(inbox, self._set_up, self._buffers, self._take_lock, self._tell)
        # One that failed is kept for ranks that come late to it.
        self._saves = {n: s for n, s in self._saves.items() if s.result is None or n == message.number - 1}
        self._saves[message.number] = save
        self._unfinished += 1
        self._jobs.put(save)
        return save

    # ---- the other thread

    def _work(self) -> None:
        while (save := self._jobs.get()) is not None:
            save.run()
            self._tell(Done(save.inbox.number))

    def _take_lock(self) -> bool:
        """Be the only writer of this host in the place; True the first time."""
        if self._is_alone or self._set_up is None:
            return False
        if self._lock is None:
            self._lock = writer_lock.take(self._set_up.place, self._set_up.node, self._set_up.timeout_seconds)
        self._is_alone = True
        return True

    def _tell(self, message: FromWriter) -> None:
        """Say it to all ranks before this returns: what follows may be the end of this process."""
        with self._sending:
            for link in list(self._links):
                _send(link, message)
        if isinstance(message, Done):
            self._wake.send(b".")

    # ---- back in the first one

    def _woken_up(self) -> None:
        self._unfinished -= len(self._woken.recv(4096))


def _send(link: Link[FromRank], message: FromWriter) -> None:
    # One that is gone may have said something before, which is yet to be heard.
    with contextlib.suppress(Closed):
        link.send(message, SEND_SECONDS)


def _mapped(hello: Hello, descriptors: list[int]) -> Buffer:
    """The staging buffer of a rank; one that writes nothing has none."""
    if not hello.image.pieces:
        return Buffer(memoryview(b""), hello.image)
    descriptor = descriptors.pop(0)
    try:
        pages = mmap.mmap(descriptor, hello.image.size_bytes, access=mmap.ACCESS_READ)
    finally:
        os.close(descriptor)
    return Buffer(memoryview(pages), hello.image)


def _same_user(connection: socket.socket) -> bool:
    """Whether the other side is a process of this user: an abstract socket name has no permissions."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1]) == os.getuid()


def _take_cpus_of(pid: int) -> None:
    """Run where the launcher may: the rank that started this process may be tied to a CPU of its own."""
    if hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, os.sched_getaffinity(pid))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m paceline.checkpoint.writer")
    parser.add_argument("--listen", type=int, required=True)
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--lock", type=int)
    parser.add_argument("--cpus-of", type=int, metavar="PID", required=True)
    given = parser.parse_args()
    _take_cpus_of(given.cpus_of)
    # It ends with its ranks and not before: a scheduler that signals every process must not cost the last save.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    disregard()
    Writer(socket.socket(fileno=given.listen), socket.socket(fileno=given.first), given.lock).serve()


if __name__ == "__main__":
    main()

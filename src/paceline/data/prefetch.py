"""Loader workers as the rank sees them: started, told which steps to make, watched, ended. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from paceline.data.channel import MADE, MAKE, READY, SENT, SETUP, Channel, Message
from paceline.data.collate import Batch, StepShape
from paceline.data.shared import IN_USE_BUFFERS, Buffer, Layout, copied, new_buffer_file
from paceline.data.worker import MARK
from paceline.errors import DataError, WorkerFailed, from_record
from paceline.workers.signals import held_back

_END_SECONDS = 1.0
_HINTS = {
    signal.SIGBUS: "A bus error: a file that it maps was cut, or shared memory is full. Look at df -h /dev/shm.",
    signal.SIGKILL: "Killed from outside, often for want of memory: look at dmesg, or lower data.workers.",
    signal.SIGSEGV: "A crash in native code of the dataset; data.workers=0 runs it in the rank.",
}


@dataclass
class _Worker:
    """One process and the buffers it writes."""

    number: int
    process: subprocess.Popen[bytes]
    channel: Channel
    buffers: list[Buffer]
    ready: bool
    free: list[int] = field(default_factory=list)
    in_flight: int = 0


@dataclass(frozen=True)
class _Made:
    """A step that a worker has finished: in a buffer, or received whole."""

    worker: _Worker
    buffer: int
    layout: Layout | None
    batches: list[Batch] | None


class Prefetcher:
    """Makes steps ahead, in order, in worker processes.

    Args:
        dataset: picklable, map-style.
        shape: which samples a step has.
        workers: processes.
        prefetch: steps ahead per process.
        first_step, last_step: the steps to make; the last one excluded, None for no end.
        rank: for messages.
        quick: steps may be made in the rank until a worker is ready (`take` then gives None).

    Raises:
        DataError: the dataset cannot be pickled.
    """

    def __init__(
        self,
        dataset: Any,
        shape: StepShape,
        *,
        workers: int,
        prefetch: int,
        first_step: int,
        last_step: int | None,
        rank: int,
        quick: bool,
    ) -> None:
        self._rank = rank
        self._next = first_step
        self._last = last_step
        self._made: dict[int, _Made] = {}
        self._pending: set[int] = set()
        self._layout: tuple[bytes, Layout] = (b"", [])  # the last one: it seldom changes
        self.notes: list[str] = []
        setup = _setup(dataset, shape)
        self._workers: list[_Worker] = []
        try:
            for number in range(workers):
                self._workers.append(_start(number, setup, prefetch + IN_USE_BUFFERS, ready=not quick))
        except BaseException:
            self.close()
            raise
        self._by_handle = {w.channel.fileno(): w for w in self._workers}
        self._poll = select.poll()
        for handle in self._by_handle:
            self._poll.register(handle, select.POLLIN)
        self._request()

    def take(self, step: int) -> list[Batch] | None:
        """The batches of `step`, or None where no worker is ready and the rank should make them itself.

        Raises:
            WorkerFailed: a worker ended, or its dataset raised.
        """
        self._collect(self._workers)
        self._request()
        if step not in self._pending and step not in self._made:
            self._next = max(self._next, step + 1)
            return None
        while step not in self._made:
            self._collect([self._by_handle[handle] for handle, _ in self._poll.poll()])
            self._request()
        self._pending.discard(step)
        return self._give(self._made.pop(step))

    def close(self) -> None:
        """End the workers. Batches that were given out stay valid."""
        for worker in self._workers:
            worker.channel.close()
        deadline = time.monotonic() + _END_SECONDS
        for worker in self._workers:
            try:
                worker.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
            for buffer in worker.buffers:
                buffer.close()
        self._workers = []
        self._made = {}

    @property
    def process_ids(self) -> list[int]:
        """Of the workers."""
        return [w.process.pid for w in self._workers]

    def _request(self) -> None:
        """Hand the next steps to the workers that have a free buffer, the one with most of them first."""
        while self._last is None or self._next < self._last:
            idle = [w for w in self._workers if w.ready and w.free]
            if not idle:
                return
            worker = max(idle, key=lambda w: len(w.free))
            with contextlib.suppress(OSError):  # a worker that is gone is seen by `_collect`
                worker.channel.send(MAKE, self._next, worker.free.pop())
            worker.in_flight += 1
            self._pending.add(self._next)
            self._next += 1

    def _collect(self, workers: list[_Worker]) -> None:
        """Take in what the workers have said."""
        for worker in workers:
            try:
                messages = worker.channel.receive()
            except EOFError:
                raise self._ended(worker) from None
            for message in messages:
                self._heard(worker, message)

    def _heard(self, worker: _Worker, message: Message) -> None:
        if message.kind == READY:
            worker.ready = True
        elif message.kind == MADE:
            if message.payload != self._layout[0]:
                self._layout = message.payload, pickle.loads(message.payload)
            self._made[message.step] = _Made(worker, message.buffer, self._layout[1], None)
        elif message.kind == SENT:
            batches, reason = pickle.loads(message.payload)
            self._made[message.step] = _Made(worker, message.buffer, None, batches)
            self._note(f"rank {self._rank}: loader worker {worker.number} sends batches through a pipe: {reason}")
        else:
            raise self._failed(worker, message)

    def _give(self, made: _Made) -> list[Batch]:
        """Views of the buffer, freed with the last of them; copies where the caller holds all other buffers."""
        worker = made.worker
        worker.in_flight -= 1
        release = partial(worker.free.append, made.buffer)
        if made.batches is not None or made.layout is None:
            release()
            return made.batches or []
        held_elsewhere = not worker.free and not worker.in_flight
        batches = worker.buffers[made.buffer].read(made.layout, release)
        return copied(batches) if held_elsewhere else batches

    def _note(self, text: str) -> None:
        if not self.notes:
            self.notes.append(text)

    def _ended(self, worker: _Worker) -> WorkerFailed:
        try:
            code = worker.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        who = f"rank {self._rank}: loader worker {worker.number} (process {worker.process.pid})"
        values = {"rank": self._rank, "worker": worker.number, "returncode": code}
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            hint = _HINTS.get(signal.Signals(-code))
            return WorkerFailed(
                f"{who} was ended by signal {-code} ({name})", values=values | {"signal": name}, hint=hint
            )
        return WorkerFailed(f"{who} ended with exit code {code} and said nothing", values=values)

    def _failed(self, worker: _Worker, message: Message) -> Exception:
        step, (trace, record) = message.step, pickle.loads(message.payload)
        if record is not None:
            return from_record(record)
        last = trace.strip().splitlines()[-1]
        where = f"at step {step}" if step >= 0 else "as it started"
        return WorkerFailed(
            f"rank {self._rank}: loader worker {worker.number} failed {where}: {last}\n{trace.rstrip()}",
            values={"rank": self._rank, "worker": worker.number, "step": step, "exception": last},
            hint="data.workers=0 runs the dataset in the rank, where it can be debugged.",
        )


def _setup(dataset: Any, shape: StepShape) -> dict[str, Any]:
    try:
        pickled = pickle.dumps(dataset)
    except Exception as error:  # pickle passes on whatever a class's own code raises
        raise DataError(
            f"the dataset {type(dataset).__name__} cannot be sent to a loader worker: {error}",
            key="data.workers",
            hint="Define it at the top of a module and keep open files out of it, or set data.workers=0.",
        ) from None
    main = None
    if b"__main__" in pickled:
        from multiprocessing import spawn

        main = spawn.get_preparation_data("loader worker")
        main = {k: v for k, v in main.items() if k not in ("authkey", "start_method")}
    return {"parent": os.getpid(), "sys_path": list(sys.path), "main": main, "dataset": pickled, "shape": shape}


def _start(number: int, setup: dict[str, Any], buffers: int, *, ready: bool) -> _Worker:
    ours, theirs = socket.socketpair()
    handles = [new_buffer_file() for _ in range(buffers)]
    command = [sys.executable, "-m", "paceline.data.worker", str(theirs.fileno()), str(number)]
    try:
        with held_back():
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                # stdout is for the command's own result
                stdout=sys.stderr.fileno() if _has_handle(sys.stderr) else None,
                env=_environment(),
                pass_fds=[theirs.fileno(), *handles],
            )
    finally:
        theirs.close()
    worker = _Worker(number, process, Channel(ours), [Buffer(h) for h in handles], ready, list(range(buffers)))
    with contextlib.suppress(OSError):  # a worker that is gone is seen at the first `take`
        worker.channel.send(SETUP, payload=pickle.dumps({**setup, "buffers": handles}))
    return worker


def _has_handle(stream: Any) -> bool:
    try:
        return isinstance(stream.fileno(), int)
    except (AttributeError, OSError, ValueError):
        return False


def _environment() -> dict[str, str]:
    """The rank's environment; one thread per library, and none in tokenizers, unless the user set it."""
    environment = {**os.environ, MARK: "1"}
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        environment.setdefault(name, "1")
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    package_root = str(Path(__file__).resolve().parents[2])
    inherited = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join([package_root, *([inherited] if inherited else [])])
    return environment

"""Saving beside training: a save blocks for the copy into the staging buffer, the writer process of the host does the rest.

No collective is called: the ranks of a host share its writer, hosts share the run's store and the folder of the step.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

import paceline
from paceline.checkpoint.exchange import KeyValueStore, share_held
from paceline.checkpoint.host_link import HostLink, WorldLike
from paceline.checkpoint.link import Closed
from paceline.checkpoint.manifest import NextStep
from paceline.checkpoint.messages import (
    Cancel,
    Done,
    Event,
    FromWriter,
    Hello,
    KeepRule,
    NextCame,
    Phase,
    SaveHead,
    SetUp,
    Staged,
    TensorKind,
)
from paceline.checkpoint.other_hosts import OtherHosts
from paceline.checkpoint.placed import Placed
from paceline.checkpoint.plan import plan_images
from paceline.checkpoint.staging import Stage, held
from paceline.checkpoint.storage import open_storage
from paceline.checkpoint.writer_process import COMMAND
from paceline.errors import PacelineError, from_record
from paceline.units import format_seconds
from paceline.workers import heartbeat

FINAL = ("written", "durable", "failed")
WAIT_SECONDS = 0.05
END_SECONDS = 10.0


class Saver:
    """Saves what the ranks hold. All ranks make it, and call `save` at the same steps.

    Args:
        storage_place: folder or URL of the checkpoints.
        placed: what this rank holds; each save reads the same tensors.
        run_id, attempt: into the manifest.
        keep: which older checkpoints stay.
        timeout_seconds: longest wait for another rank, another host or the storage.
        notify: takes what becomes of saves, on rank 0, from `poll`, `wait` and `close`.
        command: starts the writer.

    Raises:
        JobError: the place is nothing that can be opened.
    """

    def __init__(
        self,
        *,
        storage_place: str,
        placed: Sequence[Placed],
        world: WorldLike,
        run_id: str,
        attempt: int,
        keep: KeepRule,
        timeout_seconds: float,
        notify: Callable[[Event], None],
        command: Sequence[str] = COMMAND,
    ) -> None:
        open_storage(storage_place)
        self._place = storage_place
        self._placed = placed
        self._world = world
        self._run_id, self._attempt, self._keep = run_id, attempt, keep
        self._timeout = timeout_seconds
        self._notify = notify
        self._store: KeyValueStore = world.store
        # Every rank makes its savers in the same order, so that their numbers in this store agree.
        self._prefix = f"checkpoint/{self._store.add(f'checkpoint/savers/{world.rank}', 1)}"
        self._others = OtherHosts(world, self._store, self._prefix)
        self._token = f"{run_id}/{attempt}/{self._prefix}"
        self._host = HostLink(world, self._store, self._prefix, storage_place, command, self._greeting, timeout_seconds)
        self._stage: Stage | None = None
        self._kinds: dict[str, TensorKind] = {}
        self._last: Staged | None = None
        self._in_flight = False
        self._next_said = False
        self._done = 0
        self._unraised: Event | None = None
        self._warned = False
        self._gave_up = False
        self._phase = "starting the writer"
        self._events: list[Event] = []

    # ---- what the training loop calls

    def prepare(self) -> None:
        """Plan, allocate the staging buffer and start the writer: what the first save does otherwise.

        Raises:
            OutOfMemory: no room for the staging buffer.
            Stalled: another rank did not come in time.
        """
        if self._stage is not None:
            return
        world, mine = self._world, held(self._placed)
        everyone = share_held(self._store, self._prefix, world.rank, world.world_size, mine, self._timeout)
        if world.rank == 0:
            self._kinds = {p.name: TensorKind(p.dtype, p.shape) for pieces in everyone for p in pieces}
            self._store.set(f"{self._prefix}/host", os.uname().nodename)
        self._stage = Stage(plan_images(everyone)[world.rank], self._placed)
        # Where it cannot be started, each save says so.
        with contextlib.suppress(OSError):
            self._host.open(1)

    def busy(self) -> bool:
        """Whether this host still works on the last save. Never blocks."""
        self._pump()
        return self._in_flight

    def save(self, head: SaveHead, own: dict[str, Any]) -> None:
        """Copy this rank's part into the staging buffer and have it written; returns after the copy.

        Args:
            head: what the manifest says of this step. Rank 0's counts; the step must be the same on all ranks.
            own: this rank's own state, such as random states; values that JSON has.

        Raises:
            RuntimeError: the save before is still in flight.
            OutOfMemory, Stalled: at the first save, as `prepare`; Stalled also where no new writer came for a dead one.
        """
        began = time.monotonic()
        self._pump()
        if self._in_flight:
            raise RuntimeError(f"step {head.step} was to be saved while the save before it is in flight")
        self.prepare()
        number = self._number + 1
        self._tell(Event(state="requested", step=head.step, number=number))
        self._staged().copy()
        self._last = Staged(
            number=number, step=head.step, began=began, own=own, head=head if self._world.rank == 0 else None
        )
        self._send_last()

    def next_step(self, result: NextStep) -> None:
        """Rank 0: what the step after the save gave. Goes into the manifest, which waits for it a bounded time."""
        self._say_next(result)

    def poll(self) -> None:
        """Hand what became of saves to `notify`. Never blocks. On other ranks it keeps the connection going."""
        self._pump()
        self._warn_if_overdue()
        events, self._events = self._events, []
        for event in events:
            self._notify(event)

    def wait(self) -> None:
        """Until the save in flight is durable.

        Raises:
            PacelineError: it failed, for the reason given (also where `busy` or `poll` has seen that before); or it took
                longer than `timeout_seconds`: names rank, host, step, phase, place and seconds.
        """
        if self._last is None:
            return
        self._say_next(None)
        began = time.monotonic()
        try:
            # All ranks may wait here, for a storage that has its own limit and not that of a step.
            with heartbeat.waiting(f"waiting for the save of step {self._last.step}", self._timeout):
                while not self._is_settled():
                    if time.monotonic() - began > self._timeout:
                        self._gave_up = True
                        raise self._took_too_long(time.monotonic() - began)
                    self._host.wait(WAIT_SECONDS)
        finally:
            self.poll()
        failed, self._unraised = self._unraised, None
        if failed is not None and failed.error is not None:
            raise from_record(failed.error)

    def close(self) -> None:
        """Wait until the writer has nothing left to do (as long as `timeout_seconds`), and let it end.

        Where `wait` has waited in vain, the writer is left to what it does: the next attempt waits for it.
        """
        self._say_next(None)
        deadline = time.monotonic() + (0.0 if self._gave_up else self._timeout)
        while self._host.is_open and self._done < self._number and time.monotonic() < deadline:
            self._pump()
            self._host.wait(WAIT_SECONDS)
        self.poll()
        self._host.close(0.0 if self._gave_up else END_SECONDS)
        if self._stage is not None:
            self._stage.close()
            self._stage = None

    # ---- the writer of this host

    @property
    def _number(self) -> int:
        return 0 if self._last is None else self._last.number

    def _staged(self) -> Stage:
        if self._stage is None:
            raise RuntimeError("this saver is closed")
        return self._stage

    def _greeting(self) -> list[tuple[msgspec.Struct, int | None]]:
        """What a writer must know before the first save: the run, from local rank 0, and each rank's buffer."""
        world, stage = self._world, self._staged()
        hello = Hello(rank=world.rank, image=stage.image)
        greeting: list[tuple[msgspec.Struct, int | None]] = [(hello, stage.buffer.descriptor if stage.buffer else None)]
        if world.local_rank != 0:
            return greeting
        set_up = SetUp(
            place=self._place,
            token=self._token,
            run_id=self._run_id,
            attempt=self._attempt,
            version=paceline.__version__,
            node=world.node_rank,
            nodes=self._others.count + 1,
            ranks=list(range(world.rank, world.rank + world.local_world_size)),
            world_size=world.world_size,
            keep=self._keep,
            timeout_seconds=self._timeout,
            tensors=self._kinds,
        )
        return [(set_up, None), *greeting]

    def _send_last(self) -> None:
        self._in_flight, self._next_said, self._unraised, self._warned = True, False, None, False
        self._phase = "starting the writer"
        try:
            self._host.open(self._number)
        except OSError as error:
            self._hear(self._writer_ended(f"could not be reached: {error}"))
            return
        self._send(self._last)

    def _say_next(self, result: NextStep | None) -> None:
        if self._in_flight and not self._next_said and self._world.rank == 0:
            self._next_said = True
            self._send(NextCame(self._number, result))

    def _send(self, message: msgspec.Struct | None) -> None:
        try:
            if message is not None:
                # A writer that does not read is the storage's matter, and ends by its timeout.
                with heartbeat.waiting("handing a save to its writer", self._timeout):
                    self._host.send(message)
        except Closed:
            self._pump()

    def _pump(self) -> None:
        """Take what the writer has said, and notice its end."""
        for message in self._host.receive():
            self._hear(message)
        if (how := self._host.end()) is not None:
            self._done = self._number
            if self._in_flight:
                self._hear(self._writer_ended(how))
        if self._last is not None:
            self._look_elsewhere()

    def _hear(self, message: FromWriter) -> None:
        if isinstance(message, Phase):
            self._phase = message.text
        elif isinstance(message, Done):
            self._done = max(self._done, message.number)
        else:
            self._tell(message)
            if self._in_flight and message.number == self._number and message.state in FINAL:
                self._settle(message)

    def _warn_if_overdue(self) -> None:
        """Once per save: a storage that hangs must not go unnoticed while training goes on."""
        if not self._in_flight or self._warned or self._last is None:
            return
        seconds = time.monotonic() - self._last.began
        if seconds > self._timeout:
            self._warned = True
            error = self._took_too_long(seconds)
            text = error.message
            self._tell(Event(state="failed", step=self._last.step, text=text, error=error.to_record()))

    def _settle(self, event: Event) -> None:
        self._in_flight = False
        self._unraised = event if event.state == "failed" else None
        self._others.tell(event)

    def _tell(self, event: Event) -> None:
        if self._world.rank == 0:
            self._events.append(event)

    def _writer_ended(self, how: str) -> Event:
        step = self._last.step if self._last else 0
        text = f"the checkpoint writer of {os.uname().nodename} {how}, while {self._phase}"
        error = PacelineError(
            text,
            values={"step": step, "phase": self._phase, "place": self._place},
            hint="The next save starts a new one.",
        )
        return Event(state="failed", step=step, number=self._number, text=text, error=error.to_record())

    # ---- other hosts, and writers that follow a dead one

    def _look_elsewhere(self) -> None:
        if self._host.reopen(self._number):
            self._send_last()
        if self._in_flight and (ended := self._others.ended(self._number)) is not None:
            self._send(Cancel(self._number, ended.error))

    def _is_settled(self) -> bool:
        """Whether the save is done on all hosts; takes over its failure elsewhere."""
        self._pump()
        if self._in_flight or self._world.node_rank == 0:
            return not self._in_flight
        result = self._others.result(self._number)
        if result is not None:
            self._unraised = result if result.state == "failed" else None
        return result is not None

    def _took_too_long(self, seconds: float) -> PacelineError:
        here = self._in_flight
        rank = self._world.rank - self._world.local_rank if here else 0
        host = os.uname().nodename if here else self._store.get(f"{self._prefix}/host").decode()
        step = self._last.step if self._last else 0
        phase = self._phase if here else "waiting for all hosts"
        return PacelineError(
            f"waited {format_seconds(seconds)} for the checkpoint write of rank {rank} on {host}: step {step}, {phase}, "
            f"in {self._place}",
            key="checkpoint.storage_timeout",
            values={"rank": rank, "host": host, "step": step, "phase": phase, "place": self._place, "seconds": seconds},
            hint="Look at that storage; a longer wait is allowed by checkpoint.storage_timeout.",
        )

"""One save as the writer of a host does it: its ranks' files, then, on host 0, the manifest and the commit mark. No torch.

    host 0                                    other hosts
    folder (and begin.json for the others)    wait for begin.json
    a file per rank, as soon as it is staged  the same
    wait for the others' parts                part-<node>.json
    manifest.json, COMMIT
    what the keep rule no longer keeps: removed, once this one was read back

A save that fails is taken back whole; what was committed before is never touched by it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from paceline.checkpoint.folders import quarantine, step_folder, step_of, tidy
from paceline.checkpoint.host_parts import Begin, HostPart, has_begun, read_part, remove_parts, write_begin, write_part
from paceline.checkpoint.image_file import write_image
from paceline.checkpoint.inbox import Inbox
from paceline.checkpoint.keep_rule import apply_keep_rule
from paceline.checkpoint.manifest import COMMIT_FILE, MANIFEST_FILE
from paceline.checkpoint.manifest_build import build_manifest
from paceline.checkpoint.messages import Event, Phase, SetUp, State
from paceline.checkpoint.piece_file import WrittenFile, commit_step
from paceline.checkpoint.plan import Image
from paceline.checkpoint.storage import Storage, join, open_storage
from paceline.checkpoint.storage_errors import explain
from paceline.errors import PacelineError
from paceline.units import format_seconds

FILES_AT_ONCE = 4
NEXT_STEP_SECONDS = 30.0
"""How much longer than the files took the manifest waits for the result of the next step, at most."""
POLL_SECONDS = 0.05
DESERTED_SECONDS = 8.0
"""How much longer a writer whose own ranks are gone waits for other hosts: theirs may be gone as well, and the writers of
the next attempt wait for this one."""


class Buffer(NamedTuple):
    """A rank's staging buffer as this process maps it, and what lies in it."""

    view: memoryview
    image: Image


class EndedElsewhere(Exception):
    """Host 0 has ended the save without an error: the step was committed before."""


class HostSave:
    """One save. `run` does all of it, in a thread of its own; it never raises.

    Args:
        buffers: by rank. A rank's is looked up once it has staged.
        take_lock: waits for the writer of an earlier attempt; True the first time.
        tell: takes what the ranks should hear.
    """

    def __init__(
        self,
        inbox: Inbox,
        set_up: SetUp,
        buffers: Mapping[int, Buffer],
        take_lock: Callable[[], bool],
        tell: Callable[[Event | Phase], None],
    ) -> None:
        self.inbox = inbox
        self.result: Event | None = None
        self._set_up = set_up
        self._buffers = buffers
        self._take_lock = take_lock
        self._storage: Storage = open_storage(set_up.place)
        self._tell = tell
        self._folder = step_folder(inbox.step)
        self._is_coordinator = set_up.node == 0
        self._made_folder = False
        self._files: list[WrittenFile] = []
        self._writing: dict[int, str] = {}

    def run(self) -> None:
        try:
            result = self._save()
        except EndedElsewhere:
            result = self._event("written", text="it was there already")
        except Exception as error:
            result = self._failed(error)
        self.inbox.await_all()
        self.result = result
        self._tell(result)
        if result.state == "durable":
            self._apply_keep_rule()

    def _save(self) -> Event:
        self._phase("making the folder")
        self._storage.make_folder("")
        self._phase("waiting for the writer of an earlier attempt")
        if self._take_lock():
            self._tidy()
        if self._is_coordinator and self._storage.exists(f"{self._folder}/{COMMIT_FILE}"):
            return self._event("durable", text="it was there already")
        self._make_folder() if self._is_coordinator else self._await_folder()
        self._write_files()
        if not self._is_coordinator:
            write_part(self._storage, self._folder, self._host_part())
            return self._event("written", size_bytes=_size(self._files))
        self._take_parts()
        self._phase("waiting for the next step's result")
        self.inbox.await_next(self._patience())
        manifest = build_manifest(self._set_up, self.inbox, self._files)
        self._phase(f"writing {MANIFEST_FILE} and {COMMIT_FILE}")
        commit_step(self._storage, manifest)
        return self._event("durable", size_bytes=manifest.size_bytes)

    # ---- the folder

    def _tidy(self) -> None:
        """Clear what a writer that died left. What cannot be cleared now is left to the next attempt."""
        if self._is_coordinator:
            with contextlib.suppress(OSError):
                for sentence in tidy(self._storage):
                    self._tell(Event(state="removed", step=_step_in(sentence) or self.inbox.step, text=sentence))

    def _make_folder(self) -> None:
        self._clear_leftover()
        self._made_folder = True
        self._storage.make_folder(self._folder)
        if self._set_up.nodes > 1:
            write_begin(self._storage, self._folder, self._begin)

    def _clear_leftover(self) -> None:
        """What a save of this step left that did not get as far as its commit mark."""
        names = self._storage.names(self._folder)
        if MANIFEST_FILE in names:
            quarantine(self._storage, self.inbox.step, f"it has a {MANIFEST_FILE} and no {COMMIT_FILE}")
        elif names or self._storage.exists(self._folder):
            self._storage.remove_folder(self._folder)

    def _await_folder(self) -> None:
        self._phase(f"waiting for host 0 to make {self._folder}")
        self._poll(lambda: has_begun(self._storage, self._folder, self._begin), "host 0", "make the folder")

    # ---- files

    def _write_files(self) -> None:
        self._phase("waiting for the ranks to stage")
        threads = [
            threading.Thread(target=self._write_staged, name=f"file-{i}")
            for i in range(min(len(self._set_up.ranks), FILES_AT_ONCE))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.inbox.check()

    def _write_staged(self) -> None:
        try:
            while (rank := self.inbox.take()) is not None:
                if self._buffers[rank].image.pieces:
                    self._write_file(rank)
        except Exception as error:
            self.inbox.stop(error)

    def _write_file(self, rank: int) -> None:
        view, image = self._buffers[rank]
        self._writing[rank] = f"{self._folder}/{image.file} of rank {rank}"
        self._phase(f"writing {', '.join(self._writing.values())}")
        try:
            self._files.append(write_image(self._storage, self._folder, image, view, self.inbox.check))
        except OSError as error:
            raise explain(error, self._storage, f"{self._folder}/{image.file}", image.size_bytes) from error
        del self._writing[rank]
        if self._writing:
            self._phase(f"writing {', '.join(self._writing.values())}")

    # ---- several hosts

    @property
    def _begin(self) -> Begin:
        return Begin(self._set_up.token, self.inbox.number)

    def _host_part(self) -> HostPart:
        begin = self._begin
        return HostPart(
            token=begin.token, number=begin.number, node=self._set_up.node, files=self._files, own=self.inbox.own
        )

    def _take_parts(self) -> None:
        if self._set_up.nodes == 1:
            return
        for node in range(1, self._set_up.nodes):
            self._phase(f"waiting for the files of host {node}")
            found: list[HostPart] = []

            def arrived(node: int = node, found: list[HostPart] = found) -> bool:
                part = read_part(self._storage, self._folder, node, self._begin)
                found.extend([part] if part else [])
                return bool(found)

            self._poll(arrived, f"host {node}", "write its files")
            self._files += found[0].files
            self.inbox.own.update(found[0].own)
        remove_parts(self._storage, self._folder, self._set_up.nodes)

    def _poll(self, done: Callable[[], bool], who: str, what: str) -> None:
        began, timeout = time.monotonic(), self._set_up.timeout_seconds
        while not done():
            now, deserted = time.monotonic(), self.inbox.deserted_at
            if now - began > timeout:
                raise self._too_late(who, what, f"within {format_seconds(timeout)}")
            if deserted is not None and now - max(began, deserted) > DESERTED_SECONDS:
                raise self._too_late(
                    who, what, f"in the {format_seconds(DESERTED_SECONDS)} after this host's ranks ended"
                )
            self.inbox.pause(POLL_SECONDS)

    def _too_late(self, who: str, what: str, when: str) -> PacelineError:
        return PacelineError(
            f"{who} did not {what} for step {self.inbox.step} {when}",
            key="checkpoint.storage_timeout",
            values={"step": self.inbox.step, "folder": self._where, "seconds": self._set_up.timeout_seconds},
            hint="All hosts must see the same folder; look at what the ranks there printed last.",
        )

    def _patience(self) -> float:
        head = self.inbox.head
        return 0.0 if head is None or head.final else NEXT_STEP_SECONDS

    # ---- the end

    def _failed(self, error: Exception) -> Event:
        reason = explain(error, self._storage, self._folder)
        self.inbox.stop(reason)
        text = reason.message
        if self._made_folder and self._is_coordinator:
            self._phase(f"removing the half-written {self._folder}")
            try:
                self._storage.remove_folder(self._folder)
            except FileNotFoundError:
                pass
            except Exception as left:
                text += f"; {self._where} is half-written and could not be removed: {left}"
        return self._event("failed", text=text, error=reason.to_record())

    def _apply_keep_rule(self) -> None:
        """What fails here costs room, not the checkpoint: an event with number 0, and tried again."""
        step = self.inbox.step
        try:
            for event in apply_keep_rule(self._storage, step, self._set_up.keep, self._phase):
                self._tell(event)
        except Exception as error:
            reason = explain(error, self._storage, self._folder)
            text = f"older checkpoints were not removed: {reason.message}"
            self._tell(Event(state="failed", step=step, text=text, error=reason.to_record()))

    @property
    def _where(self) -> str:
        return join(self._storage.place, self._folder)

    def _phase(self, text: str) -> None:
        self._tell(Phase(self.inbox.number, text))

    def _event(self, state: State, **values: Any) -> Event:
        seconds = time.monotonic() - self.inbox.began
        step, number = self.inbox.step, self.inbox.number
        return Event(state=state, step=step, number=number, seconds=seconds, folder=self._folder, **values)


def _step_in(sentence: str) -> int | None:
    """The step of the folder that a sentence of `tidy` is about."""
    steps = [step_of(word.strip(",").rpartition("/")[2]) for word in sentence.split()]
    return next((step for step in steps if step is not None), None)


def _size(files: list[WrittenFile]) -> int:
    return sum(file.file.size_bytes for file in files)

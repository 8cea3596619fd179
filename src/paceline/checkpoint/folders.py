"""The folders of checkpoints in one place: which steps are there, which are whole, what becomes of the rest. No torch.

step-00000100/              committed: it has a COMMIT that names its manifest
quarantine/step-00000090-1/ moved away because something in it is wrong, with `reason.json`; never deleted here
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from paceline.checkpoint.manifest import (
    COMMIT_FILE,
    MANIFEST_FILE,
    Commit,
    Manifest,
    decode_commit,
    decode_manifest,
)
from paceline.checkpoint.storage import Storage, join
from paceline.errors import NoCheckpoint

QUARANTINE = "quarantine"
REASON_FILE = "reason.json"
_STEP = re.compile(r"step-([0-9]{8,})")


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """`reason.json` of a folder in quarantine."""

    step: int
    reason: str
    time: float


class PassedOver(NamedTuple):
    """A committed step that is not whole, and the first thing that is wrong with it."""

    step: int
    reason: str


class Newest(NamedTuple):
    """The newest checkpoint that is whole (None: there is none), and the newer ones that are not, newest first."""

    step: int | None
    manifest: Manifest | None
    passed_over: tuple[PassedOver, ...]


class Described(Protocol):
    """A finding, as far as it matters here."""

    def describe(self) -> str: ...


def step_folder(step: int) -> str:
    """`step-00000100`."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step of a folder's name; None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match and step_folder(int(match[1])) == name else None


def list_steps(storage: Storage) -> list[int]:
    """The committed steps, rising."""
    return sorted(step for step in _all_steps(storage) if storage.exists(f"{step_folder(step)}/{COMMIT_FILE}"))


def read_commit(storage: Storage, step: int) -> Commit:
    """The commit mark of a step.

    Raises:
        NoCheckpoint: there is none, it is damaged, or it is that of another step.
    """
    return commit_in(storage, step_folder(step), step)


def read_manifest(storage: Storage, step: int) -> Manifest:
    """The manifest of a committed step, proven by its mark.

    Raises:
        NoCheckpoint: the step is not committed, or the mark or the manifest is damaged.
    """
    folder = step_folder(step)
    return manifest_in(storage, folder, commit_in(storage, folder, step))


def commit_in(storage: Storage, folder: str, step: int | None) -> Commit:
    """As `read_commit`, of a folder with any name; without `step` the mark's own step counts."""
    where = join(storage.place, folder)
    try:
        data = storage.read(_name(folder, COMMIT_FILE))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise NoCheckpoint(
            f"{where} is no complete checkpoint: it has no {COMMIT_FILE}", values={"path": where, "step": step}
        ) from None
    commit = decode_commit(data, where)
    if step is not None and commit.step != step:
        raise NoCheckpoint(
            f"{where}/{COMMIT_FILE} is that of step {commit.step}, not of step {step}",
            values={"path": f"{where}/{COMMIT_FILE}", "expected": step, "actual": commit.step},
        )
    return commit


def manifest_in(storage: Storage, folder: str, commit: Commit) -> Manifest:
    """As `read_manifest`, of a folder with any name."""
    where = join(storage.place, folder)
    try:
        data = storage.read(_name(folder, MANIFEST_FILE))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise NoCheckpoint(
            f"{where} has a {COMMIT_FILE} and no {MANIFEST_FILE}", values={"path": f"{where}/{MANIFEST_FILE}"}
        ) from None
    return decode_manifest(data, commit, where)


def tidy(storage: Storage) -> list[str]:
    """Clear what dead attempts left unfinished; one sentence for each folder.

    A folder without a manifest is a save that had not got far: removed. One with a manifest and no mark is moved into
    quarantine. Committed folders are not looked at. Call it only while no writer of this place is alive.
    """
    return [_tidy_folder(storage, step) for step in _all_steps(storage) if not _has(storage, step, COMMIT_FILE)]


def quarantine(storage: Storage, step: int, reason: str) -> str:
    """Move a step's folder out of the way, with the reason beside it; gives the folder's new name."""
    storage.make_folder(QUARANTINE)
    taken = set(storage.names(QUARANTINE))
    count = 1
    while f"{step_folder(step)}-{count}" in taken:
        count += 1
    target = f"{QUARANTINE}/{step_folder(step)}-{count}"
    storage.move_folder(step_folder(step), target)
    note = msgspec.json.encode(Reason(step=step, reason=reason, time=time.time())) + b"\n"
    storage.write(f"{target}/{REASON_FILE}", [note], len(note))
    storage.sync_folder(target)
    return target


def reason_of(storage: Storage, name: str) -> str:
    """Why folder `name` is in quarantine."""
    try:
        return msgspec.json.decode(storage.read(f"{QUARANTINE}/{name}/{REASON_FILE}"), type=Reason).reason
    except (OSError, msgspec.DecodeError):
        return f"it has no readable {REASON_FILE}"


def newest_valid(storage: Storage, quick_verify: Callable[[Storage, int], Sequence[Described]]) -> Newest:
    """The newest committed step in which `quick_verify` finds nothing; moves and removes nothing."""
    passed: list[PassedOver] = []
    for step in reversed(list_steps(storage)):
        findings = quick_verify(storage, step)
        if not findings:
            return Newest(step, read_manifest(storage, step), tuple(passed))
        passed.append(PassedOver(step, findings[0].describe()))
    return Newest(None, None, tuple(passed))


def _tidy_folder(storage: Storage, step: int) -> str:
    folder = step_folder(step)
    where = join(storage.place, folder)
    if not _has(storage, step, MANIFEST_FILE):
        storage.remove_folder(folder)
        return f"removed {where}, a save that did not finish"
    target = quarantine(storage, step, f"it has a {MANIFEST_FILE} and no {COMMIT_FILE}: the save did not finish")
    return f"moved {where}, a save that finished all but its {COMMIT_FILE}, to {target}"


def _all_steps(storage: Storage) -> list[int]:
    return sorted(step for step in map(step_of, storage.names()) if step is not None)


def _has(storage: Storage, step: int, file: str) -> bool:
    return storage.exists(f"{step_folder(step)}/{file}")


def _name(folder: str, file: str) -> str:
    return f"{folder}/{file}" if folder else file

"""What lies at a place: every checkpoint with its age, its size and whether it looks whole, and what is not one. No torch."""

from __future__ import annotations

from typing import Literal

import msgspec

from paceline.checkpoint.folders import QUARANTINE, REASON_FILE, Reason, step_folder, step_of
from paceline.checkpoint.manifest import COMMIT_FILE, Manifest
from paceline.checkpoint.pieces import explained
from paceline.checkpoint.places import Found, find_place
from paceline.checkpoint.storage import Storage, join
from paceline.checkpoint.verify import quick
from paceline.errors import NoCheckpoint

State = Literal["whole", "damaged", "unfinished", "quarantined"]


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """A folder.

    Attributes:
        path, step: where it is, and of which step.
        state: whole as far as can be seen without reading the pieces (mark, manifest, files and their lengths); damaged;
            unfinished, which has no mark; moved into quarantine.
        problem: what is wrong, or why it was moved.
        size_bytes: of its files.
        time: when it was saved, in seconds since the epoch; None where its manifest does not say.
        samples, world_size, run_id, attempt, eval_loss: as its manifest has them.
    """

    path: str
    step: int | None
    state: State
    problem: str | None = None
    size_bytes: int = 0
    time: float | None = None
    samples: int | None = None
    world_size: int | None = None
    run_id: str | None = None
    attempt: int | None = None
    eval_loss: float | None = None


def list_checkpoints(place: str) -> list[Listed]:
    """All at a path or URL by step, those in quarantine last.

    Raises:
        NoCheckpoint: nothing of the kind is there.
        JobError: the storage refuses to be read.
    """
    storage, is_step = find_place(place)
    with explained(storage, ""):
        if is_step:
            return [_listed(storage, "", None)]
        steps = sorted(step for step in map(step_of, storage.names()) if step is not None)
        found = [_listed(storage, step_folder(step), step) for step in steps]
        found += [_quarantined(storage, f"{QUARANTINE}/{name}") for name in storage.names(QUARANTINE)]
    if not found:
        raise NoCheckpoint(f"{storage.place} holds no checkpoint", values={"path": storage.place})
    return found


def _listed(storage: Storage, folder: str, step: int | None) -> Listed:
    path, size = join(storage.place, folder), _size_bytes(storage, folder)
    name = f"{folder}/{COMMIT_FILE}" if folder else COMMIT_FILE
    if not storage.exists(name):
        return Listed(path=path, step=step, state="unfinished", problem=f"it has no {COMMIT_FILE}", size_bytes=size)
    try:
        findings = quick(storage, step, folder)
        manifest = None if findings else Found(storage, folder).manifest()
    except NoCheckpoint as error:
        return Listed(path=path, step=step, state="damaged", problem=error.message, size_bytes=size)
    if manifest is None:
        return Listed(path=path, step=step, state="damaged", problem=findings[0].describe(), size_bytes=size)
    return _described(manifest, path, size)


def _described(manifest: Manifest, path: str, size: int) -> Listed:
    loss = manifest.state.get("eval_loss")
    return Listed(
        path=path,
        step=manifest.step,
        state="whole",
        size_bytes=size,
        time=manifest.time,
        samples=manifest.samples,
        world_size=manifest.world_size,
        run_id=manifest.run_id or None,
        attempt=manifest.attempt,
        eval_loss=float(loss) if isinstance(loss, int | float) else None,
    )


def _quarantined(storage: Storage, folder: str) -> Listed:
    step = step_of(folder.removeprefix(f"{QUARANTINE}/").rpartition("-")[0])
    try:
        note = msgspec.json.decode(storage.read(f"{folder}/{REASON_FILE}"), type=Reason)
        reason, when = note.reason, note.time
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        reason, when = f"it has no {REASON_FILE} that can be read", None
    return Listed(
        path=join(storage.place, folder),
        step=step,
        state="quarantined",
        problem=reason,
        size_bytes=_size_bytes(storage, folder),
        time=when,
    )


def _size_bytes(storage: Storage, folder: str) -> int:
    if folder and storage.kind(folder) == "link":
        return 0
    names = (f"{folder}/{name}" if folder else name for name in storage.names(folder))
    return sum(storage.size(name) or 0 for name in names if storage.kind(name) == "file")

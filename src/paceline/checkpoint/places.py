"""From what a user names (a step, checkpoints or run folder, or a URL) to the checkpoints there. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from paceline.checkpoint.folders import commit_in, list_steps, manifest_in, step_folder
from paceline.checkpoint.manifest import COMMIT_FILE, MANIFEST_FILE, Manifest
from paceline.checkpoint.pieces import explained
from paceline.checkpoint.storage import Storage, join, open_storage
from paceline.errors import NoCheckpoint

CHECKPOINTS = "checkpoints"
_NAME = "Name a run directory, a checkpoints folder, one step's folder, or a URL."
_LIST = "See what is there: `paceline checkpoint list PATH`."


class Found(NamedTuple):
    """A committed checkpoint: its folder in a storage, "" where the storage is that folder."""

    storage: Storage
    folder: str

    @property
    def where(self) -> str:
        return join(self.storage.place, self.folder)

    def manifest(self) -> Manifest:
        """The manifest, which must be the one that was committed.

        Raises:
            NoCheckpoint: it is damaged, not committed, or of a newer format.
        """
        with explained(self.storage, self.folder):
            return manifest_in(self.storage, self.folder, commit_in(self.storage, self.folder, None))


class Place(NamedTuple):
    """Where checkpoints are: the folder of one step, or a folder of such folders."""

    storage: Storage
    is_step: bool


def find_place(place: str) -> Place:
    """The place that a path or URL names; a run directory means its checkpoints.

    Raises:
        NoCheckpoint: nothing of the kind is there.
    """
    if "://" not in place and not Path(place).is_dir():
        raise NoCheckpoint(f"there is no folder {place}", values={"path": place}, hint=_NAME)
    storage = open_storage(place)
    if storage.exists(COMMIT_FILE) or storage.exists(MANIFEST_FILE):
        return Place(storage, is_step=True)
    if elsewhere := _of_run(place):
        return Place(open_storage(elsewhere), is_step=False)
    return Place(storage, is_step=False)


def find_one(place: str) -> Found:
    """The checkpoint at `place`: that step, or the newest committed one.

    Raises:
        NoCheckpoint: there is none.
    """
    storage, is_step = find_place(place)
    if is_step:
        return Found(storage, "")
    steps = list_steps(storage)
    if not steps:
        raise NoCheckpoint(f"{storage.place} holds no checkpoint", values={"path": storage.place}, hint=_LIST)
    return Found(storage, step_folder(steps[-1]))


def _of_run(place: str) -> str | None:
    """Where a run directory's checkpoints are; None where `place` is no run directory."""
    if "://" in place:
        return None
    folder = Path(place)
    try:
        values = msgspec.json.decode((folder / "job.json").read_bytes())["values"]
    except (OSError, ValueError, KeyError, TypeError):
        values = {}
    stated = values.get("checkpoint.dir", "auto")
    if stated != "auto":
        return str(stated)
    return str(folder / CHECKPOINTS) if (folder / CHECKPOINTS).is_dir() else None

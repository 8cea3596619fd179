"""What a live run is asked to do from outside: files in `control/` of its directory, whose names are the requests.

    control/stop     save after the step that is being made, and end (exit code 75)
    control/save     save after the step that is being made, and go on
    control/procs    go on with the number of ranks in it (where the run was started with a range): `3`, or `3 without 1`

The run removes a file once it has done what it asks. What stands there from before a start is void.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from paceline.errors import JobError
from paceline.run.files import is_no_space, write_atomic

FOLDER = "control"
STOP, SAVE, PROCS = "stop", "save", "procs"
NAMES = (STOP, SAVE, PROCS)
DOOR = "launch.nodes"
"""Begins how a run is asked to stop a moment so that a node may come in; no file asks for that."""
GOES_ON = (f"{FOLDER}/{PROCS}", DOOR)
"""Begins how a run is asked to stop that goes on at once, with other ranks: a request to end it stands meanwhile."""
LOOK_SECONDS = 0.2
"""A run looks that often at most: on a network file system each look is a message to its server."""


class Control:
    """The requests to the run in `path`, as the run reads them."""

    def __init__(self, path: Path) -> None:
        self._folder = Path(path) / FOLDER
        self._void: dict[str, int] = {}
        self._looked = -1.0
        self._seen: dict[str, int] = {}

    def clear(self) -> list[str]:
        """Void what was asked before this start; returns sentences about it.

        Raises:
            JobError: it cannot be removed, and would be met by every start anew.
        """
        notes = []
        with contextlib.suppress(OSError):
            self._folder.mkdir(exist_ok=True)
        for name in self._stamps():
            try:
                (self._folder / name).unlink(missing_ok=True)
            except OSError as error:
                raise JobError(
                    f"{self._folder / name} is left from before this start and cannot be removed: {error.strerror}",
                    key="run.dir",
                    values={"file": str(self._folder / name), "errno": error.errno},
                    hint="Remove it as its owner; else the run would do at once what it asks.",
                ) from None
            notes.append(f"{self._folder / name} stood there before this start: it is void and was removed")
        return notes

    def asked(self, name: str) -> bool:
        """Whether there is a request of this name."""
        now = time.monotonic()
        if now - self._looked >= LOOK_SECONDS:
            self._looked, self._seen = now, self._stamps()
        return name in self._seen

    def age_seconds(self, name: str) -> float:
        """How long ago the request was made, by the clock of its file system; 0 where there is none."""
        stamp = self._seen.get(name)
        return 0.0 if stamp is None else max(0.0, time.time() - stamp / 1e9)

    def text(self, name: str) -> str:
        """What a request says besides its name."""
        with contextlib.suppress(OSError):
            return (self._folder / name).read_text(encoding="utf-8", errors="replace").strip()
        return ""

    def done(self, name: str) -> str | None:
        """Remove a request that has been met; a sentence where that is impossible, and the file is void from then on."""
        stamp = self._seen.pop(name, None)
        if stamp is None:
            return None
        try:
            (self._folder / name).unlink(missing_ok=True)
        except OSError as error:
            self._void[name] = stamp
            return f"warning: {self._folder / name} cannot be removed ({error.strerror}); it is ignored from now on"
        return None

    def _stamps(self) -> dict[str, int]:
        """When each request was made, in nanoseconds since the epoch."""
        found = {}
        for name in NAMES:
            with contextlib.suppress(OSError):
                stamp = (self._folder / name).stat().st_mtime_ns
                if self._void.get(name) != stamp:
                    found[name] = stamp
        return found


def ask(path: Path, name: str, text: str = "") -> Path:
    """Make a request of the run in `path`; returns its file.

    Args:
        name: `STOP`, `SAVE` or `PROCS`.
        text: the number of ranks wanted, for `PROCS`.

    Raises:
        JobError: the folder of requests cannot be written.
        DiskFull: no space.
    """
    file = Path(path) / FOLDER / name
    try:
        file.parent.mkdir(exist_ok=True)
        write_atomic(file, f"{text}\n")
    except OSError as error:
        if is_no_space(error):
            raise
        raise JobError(
            f"cannot write {file}: {error.strerror}",
            key="run.dir",
            values={"file": str(file), "errno": error.errno},
            hint="Give the command as the user who started the run, or send SIGTERM to its launcher.",
        ) from None
    return file


def ask_procs(path: Path, procs: int, without: int | None = None) -> Path:
    """Ask the run in `path` to go on with `procs` local ranks; see `ask`.

    Args:
        without: a rank whose device, or whose processors, are not used any more.
    """
    return ask(path, PROCS, f"{procs}" if without is None else f"{procs} without {without}")


def withdraw(path: Path, name: str) -> None:
    """Take a request back that nobody is there to meet."""
    with contextlib.suppress(OSError):
        (Path(path) / FOLDER / name).unlink(missing_ok=True)

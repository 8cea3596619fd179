"""`plan --write`: the chosen layout in the job file, its comments and order kept. No torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from paceline.errors import JobError, UsageError


def check_writable(path: Path | None) -> None:
    """Refuse to write before anything is searched.

    Raises:
        UsageError: there is no job file on the command line.
        JobError: the file cannot be written.
    """
    if path is None:
        raise UsageError(
            "--write puts the layout into a job file, and none is named",
            key="--write",
            hint="Name one: paceline plan JOB.toml --cluster SPEC --write.",
        )
    if path.exists() and not os.access(path, os.W_OK):
        raise _unwritable(path, "it is read-only")


def write_layout(path: Path, keys: dict[str, Any]) -> str:
    """Set the keys of a layout in a job file; returns what was written, in words.

    Raises:
        JobError: the file cannot be written.
    """
    from paceline.job.write import write_keys  # loads tomlkit, which a plan that is not written does not need

    try:
        write_keys(path, {**keys, "parallel.layout": "given"})
    except OSError as error:
        raise _unwritable(path, error.strerror or str(error)) from None
    return "wrote " + ", ".join(f"{key}={value}" for key, value in keys.items())


def _unwritable(path: Path, reason: str) -> JobError:
    return JobError(
        f"cannot write {path}: {reason}",
        key="--write",
        values={"path": str(path)},
        hint=f"Allow it with chmod u+w {path}, or plan a copy of it.",
    )

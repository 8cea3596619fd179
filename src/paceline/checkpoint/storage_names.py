"""Names inside a place of checkpoints: relative, "/" between folders, never out of the place. No torch."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import JobError


def join(place: str | Path, name: str) -> str:
    """`place/name` for messages and for `open_storage`, whether the place is a folder or a URL."""
    text = str(place)
    return f"{text.rstrip('/') or '/'}/{name}".replace("//" + name, "/" + name) if name else text


def checked_name(name: str) -> str:
    """The name, where it stays inside its place.

    Raises:
        JobError: it is absolute, has an empty part, or has ".." or "." in it.
    """
    if name and any(part in ("", ".", "..") or "\0" in part for part in name.split("/")):
        raise JobError(f"{name!r} is not a name inside a checkpoint folder", values={"name": name})
    return name

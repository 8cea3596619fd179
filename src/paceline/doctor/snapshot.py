"""A snapshot file: one JSON document per host. Imports no torch."""

from __future__ import annotations

from pathlib import Path

import msgspec

from paceline.doctor.host import FORMAT, Host
from paceline.errors import Unreadable, UsageError

SCHEMA = "paceline.host/1"


class _File(msgspec.Struct, kw_only=True, rename={"schema_": "schema"}):
    schema_: str
    host: Host


class _Head(msgspec.Struct, kw_only=True, rename={"schema_": "schema"}):
    schema_: str = ""
    host: dict[str, object] = {}


def write(host: Host, path: Path) -> None:
    """Write a snapshot. Raises UsageError where the file cannot be written."""
    text = msgspec.json.format(msgspec.json.encode(_File(schema_=SCHEMA, host=host)), indent=1)
    try:
        path.write_bytes(text + b"\n")
    except OSError as error:
        raise UsageError(
            f"--capture {path}: {error.strerror}", values={"path": str(path)}, hint="Name a file that can be written."
        ) from None


def read(path: Path) -> Host:
    """The host of a snapshot file.

    Raises:
        UsageError: there is no such file.
        Unreadable: it is of a newer version, cut short or damaged.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"--from {path}: {error.strerror}",
            values={"path": str(path)},
            hint="Make one on the host in question: paceline doctor --capture FILE.",
        ) from None
    return decode(content, str(path))


def decode(content: bytes, origin: str) -> Host:
    """The host of a snapshot's bytes. Raises Unreadable."""
    try:
        head = msgspec.json.decode(content, type=_Head)
    except msgspec.ValidationError:
        head = _Head()
    except msgspec.DecodeError:
        cut = not content.rstrip().endswith(b"}")
        what = "is cut short" if cut else "is no JSON document"
        raise _unreadable(origin, f"{what} ({len(content)} bytes)", "Capture it again.") from None
    version = head.host.get("format")
    if not head.schema_.startswith("paceline.host/") or not isinstance(version, int):
        raise _unreadable(origin, "is no snapshot of a host", "Make one: paceline doctor --capture FILE.")
    if version > FORMAT:
        raise _unreadable(
            origin,
            f"has format {version}, this program reads up to {FORMAT}",
            "Read it with the paceline that captured it, or a newer one.",
        )
    try:
        return msgspec.json.decode(content, type=_File).host
    except msgspec.ValidationError as error:
        raise _unreadable(origin, f"is damaged: {error}", "Capture it again.") from None


def encode(host: Host) -> bytes:
    """A snapshot as bytes, for another rank."""
    return msgspec.json.encode(_File(schema_=SCHEMA, host=host))


def _unreadable(origin: str, what: str, hint: str) -> Unreadable:
    return Unreadable(f"the snapshot {origin} {what}", values={"path": origin}, hint=hint)

"""Fields of a published run's line, as they are found: of another form, or not there. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Table = Mapping[str, Any]


class NotModelled(Exception):
    """A run that is not modelled; the message is the reason."""


def part(row: Table, name: str) -> Table:
    """A part of a line; empty where it is none."""
    found = row.get(name)
    return found if isinstance(found, dict) else {}


def optional(table: Table, key: str) -> int | None:
    """A positive whole number, or None where there is no such."""
    value = table.get(key)
    if value is None or isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        return None
    return int(value)


def whole(table: Table, key: str, reason: str) -> int:
    """A positive whole number; where there is none the run is not modelled."""
    value = optional(table, key)
    if value is None:
        raise NotModelled(reason)
    return value


def refuse(reason: str) -> int:
    """Say why a run is not modelled, where a number is wanted."""
    raise NotModelled(reason)

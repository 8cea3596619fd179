"""Fields of a published run's line, as they are found: of another form, or not there. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Table = Mapping[str, Any]

MOST = {"layers": 2000, "pp": 2000, "vpp": 200, "global_batch": 1e7, "gpus_per_node": 1000}
"""Beyond these a number is a mistake of the line, and would cost a long time to be predicted."""


class NotModelled(Exception):
    """A run that is not modelled; the message is the reason."""


def part(row: Table, name: str) -> Table:
    """A part of a line; empty where it is none."""
    found = row.get(name)
    return found if isinstance(found, dict) else {}


def optional(table: Table, key: str) -> int | None:
    """A positive whole number, or None where there is no such."""
    value = table.get(key)
    if value is None or isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        return None
    if value > MOST.get(key, 1e7):
        raise NotModelled(f"{key} of {value:g} cannot be")
    return max(1, int(value))


def positive(table: Table, key: str) -> float | None:
    """A finite number above 0, or None where there is no such."""
    value = table.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 < value < math.inf else None


def whole(table: Table, key: str, reason: str) -> int:
    """A positive whole number; where there is none the run is not modelled."""
    value = optional(table, key)
    if value is None:
        raise NotModelled(reason)
    return value


def refuse(reason: str) -> int:
    """Say why a run is not modelled, where a number is wanted."""
    raise NotModelled(reason)

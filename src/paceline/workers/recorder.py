"""The collectives that this rank has entered, from the engine's flight recorder. Looks for torch and never imports it.

The recorder is no public interface, so nothing here may fail for want of it. With Gloo the `state` of an entry stays
`scheduled` for ever, but `retired` tells whether it has ended (torch 2.13, docs/log.md). Gloo records no point-to-point
operation.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

RECENT = 600
"""Entries that are handed over: several steps, so that a rank's own habit can be told from them."""


class Entry(NamedTuple):
    """One collective that a rank has entered: `number` counts those of its group from 1, `sizes` are its input's shapes."""

    group: str
    number: int
    op: str
    sizes: str
    running: bool

    @property
    def signature(self) -> tuple[str, str, str]:
        """What the same collective has on all ranks, besides its number."""
        return self.group, self.op, self.sizes

    def __str__(self) -> str:
        return f"{self.op} number {self.number} (sizes {self.sizes}) in group {self.group}"


class Seen(NamedTuple):
    """What a rank has entered: the last entries in order, and the members of each of its groups."""

    entries: tuple[Entry, ...] = ()
    members: Mapping[str, tuple[int, ...]] = {}

    @property
    def running(self) -> list[Entry]:
        """Entered and not ended."""
        return [entry for entry in self.entries if entry.running]

    def last_number(self, group: str) -> int:
        """Of the last collective that was entered in a group; 0 before the first."""
        return max((entry.number for entry in self.entries if entry.group == group), default=0)

    def to_plain(self) -> dict[str, Any]:
        return {"entries": [list(entry) for entry in self.entries], "members": dict(self.members)}


def seen_of(plain: Mapping[str, Any] | None) -> Seen | None:
    """What `Seen.to_plain` wrote."""
    if plain is None:
        return None
    members = {str(group): tuple(ranks) for group, ranks in plain.get("members", {}).items()}
    return Seen(tuple(Entry(*entry) for entry in plain.get("entries", ())), members)


def seen() -> Seen | None:
    """In a worker: the collectives entered so far, or None without a recorder."""
    engine = sys.modules.get("torch._C._distributed_c10d")
    if engine is None:
        return None
    try:
        raw = json.loads(engine._dump_fr_trace_json(True, False)).get("entries", [])
        entries = tuple(_entry(one) for one in raw[-RECENT:] if not one.get("is_p2p"))
    except Exception:
        return None
    return Seen(entries, _members())


def last_entered() -> str | None:
    """In a worker: name and size of the collective that it entered last."""
    found = seen()
    return str(found.entries[-1]) if found is not None and found.entries else None


def _entry(raw: Mapping[str, Any]) -> Entry:
    name, described = (*raw["process_group"], "")[:2]
    group = described if described and described != "undefined" else name
    if group != name and group != "default_pg":
        group = f"{described} ({name})"
    running = not raw.get("retired", False) and raw.get("state") != "completed"
    op = str(raw["profiling_name"]).rpartition(":")[2]
    return Entry(group, int(raw["collective_seq_id"]), op, json.dumps(raw["input_sizes"]), running)


def _members() -> dict[str, tuple[int, ...]]:
    """Global ranks by group, under the names that `_entry` gives."""
    python = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        world = python._world  # type: ignore[union-attr]
        found = {}
        for group, ranks in world.pg_group_ranks.items():
            name, described = world.pg_names[group], str(getattr(group, "group_desc", ""))
            one = {"process_group": (name, described), "collective_seq_id": 0, "profiling_name": "", "input_sizes": []}
            found[_entry(one).group] = tuple(sorted(ranks))
        return found
    except Exception:
        return {}

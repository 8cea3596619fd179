"""Differences between hosts as one sentence each. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from paceline.doctor.host import Host

SHOWN = 4


def differences(hosts: Sequence[Host], value: Callable[[Host], str]) -> Iterator[str]:
    """`A on node1, node2 and B on node3` where a value is not the same everywhere; the most frequent one first."""
    groups: dict[str, list[str]] = {}
    for host in hosts:
        names = groups.setdefault(value(host), [])
        if host.name not in names:
            names.append(host.name)
    if len(groups) > 1:
        ordered = sorted(groups.items(), key=lambda group: -len(group[1]))
        yield " and ".join(f"{text} on {_listed(names)}" for text, names in ordered)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")

"""Which links explain the flows that are bad: the fewest ends of links that cover them. Imports no torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal, NamedTuple

from paceline.bench.pairs import Flow, Seen

Way = Literal["out", "into"]
WAYS: tuple[Way, ...] = ("out", "into")

SLOW = 0.75
"""A flow is slow that has less than this share of what flows of its kind have."""

LOSES, LOSES_SEGMENTS = 0.005, 3
"""Share, and number, of segments sent again from which on an otherwise idle link loses frames."""

STALLS = 0.15
COVERS = 0.6
"""A link's end is at fault where at least this share of its flows is bad."""


class End(NamedTuple):
    """One direction of a host's link: what it sends (`out`) or what it is sent (`into`)."""

    host: int
    way: Way

    def has(self, flow: Flow) -> bool:
        return self.host == (flow.source if self.way == "out" else flow.target)


class Blame(NamedTuple):
    """Ends at fault, and flows that are bad without one: a path of its own."""

    ends: list[End]
    paths: list[Flow]


def lossy(alone: Sequence[Seen]) -> Blame:
    """Ends that lose frames: flows over them stall, or their senders have to send again, with nothing else on the way."""
    return _fewest_ends([seen.flow for seen in alone], {seen.flow for seen in alone if loses(seen)})


def loses(seen: Seen) -> bool:
    """Whether a flow that was alone lost frames: TCP says so itself, or it stalls where it cannot be asked."""
    if seen.resent is None:
        return seen.stalled > STALLS
    return seen.resent > LOSES and seen.resent * seen.segments >= LOSES_SEGMENTS


def slow(
    alone: Sequence[Seen], groups: Sequence[Sequence[int]], left_out: Collection[int] = (), covers: float = COVERS
) -> Blame:
    """Ends that are slower than the others, where flows inside a group and across groups are compared with their like."""
    judged = [seen for seen in alone if seen.source not in left_out and seen.target not in left_out]
    usual = usual_rates(judged, groups)
    kind = _kinds(groups)
    bad = {seen.flow for seen in judged if seen.bytes_per_second < SLOW * usual[kind(seen.flow)]}
    return _fewest_ends([seen.flow for seen in judged], bad, covers)


Kind = tuple[int, int] | None


def usual_rates(alone: Sequence[Seen], groups: Sequence[Sequence[int]]) -> dict[Kind, float]:
    """Bytes per second of a sound flow by kind: None inside any group, else (from group, to group).

    The upper quartile: of three hosts one with a bad link spoils four flows of six.
    """
    kind = _kinds(groups)
    rates: dict[Kind, list[float]] = {}
    for seen in alone:
        rates.setdefault(kind(seen.flow), []).append(seen.bytes_per_second)
    return {name: sorted(found)[math.ceil(0.75 * (len(found) - 1))] for name, found in rates.items()}


def rate_over(end: End, alone: Sequence[Seen]) -> float:
    """Median rate of the flows over a link's end, in bytes per second."""
    return statistics.median(seen.bytes_per_second for seen in alone if end.has(seen.flow))


def _kinds(groups: Sequence[Sequence[int]]) -> Callable[[Flow], Kind]:
    of = {host: number for number, group in enumerate(groups) for host in group}

    def kind(flow: Flow) -> Kind:
        source, target = of.get(flow.source, 0), of.get(flow.target, 0)
        return None if source == target else (source, target)

    return kind


def _fewest_ends(flows: Sequence[Flow], bad: Iterable[Flow], share: float = COVERS) -> Blame:
    """Greedy cover: the end with most bad flows first. One bad flow is a path, not yet an end."""
    unexplained, left = set(flows), set(bad)
    ends = [End(host, way) for host in sorted({host for flow in flows for host in flow}) for way in WAYS]
    found: list[End] = []
    while left:
        covers = {end: {flow for flow in left if end.has(flow)} for end in ends}
        of = {end: sum(1 for flow in unexplained if end.has(flow)) for end in ends}
        fitting = [end for end in ends if len(covers[end]) > 1 and len(covers[end]) >= share * of[end]]
        if not fitting:
            break
        best = max(fitting, key=lambda end: (len(covers[end]), len(covers[end]) / of[end]))
        found.append(best)
        left -= covers[best]
        unexplained = {flow for flow in unexplained if not best.has(flow)}
    return Blame(sorted(found), sorted(left))

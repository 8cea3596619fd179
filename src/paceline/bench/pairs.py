"""Pairs of hosts: who sends to whom at once, and what the receiver saw. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import permutations
from typing import NamedTuple

import msgspec

MANY_HOSTS = 16
"""From here on a pair alone is measured with a few partners of each host only: all of them would take minutes."""


class Flow(NamedTuple):
    """Data on its way from one host to another, by their positions in the list of hosts."""

    source: int
    target: int


class Seen(msgspec.Struct, frozen=True):
    """One flow as its receiver saw it."""

    source: int
    target: int
    bytes_per_second: float
    error: float = 0.0
    """Of the rate, as a share of it: the standard error over parts of the time."""
    stalled: float = 0.0
    """Share of the time in gaps far longer than the usual one between two chunks."""
    resent: float | None = None
    """Share of the segments that the sender's TCP had to send again; None where the system does not say."""

    segments: int = 0
    """That the sender sent, as far as the system says."""

    @property
    def flow(self) -> Flow:
        return Flow(self.source, self.target)


def merged(first: Seen, again: Seen) -> Seen:
    """Two measurements of a flow as one: the better rate, since whatever else the machines do only takes; all losses."""
    better = max(first, again, key=lambda seen: seen.bytes_per_second)
    sent = first.segments + again.segments
    resent = None
    if first.resent is not None and again.resent is not None:
        resent = (first.resent * first.segments + again.resent * again.segments) / max(1, sent)
    return Seen(
        *first.flow,
        better.bytes_per_second,
        better.error,
        min(first.stalled, again.stalled),
        resent=resent,
        segments=sent,
    )


def each_alone(hosts: int) -> list[Flow]:
    """Every flow that is measured with nothing else on the fabric, in both directions.

    Up to `MANY_HOSTS` all pairs; above that each host with those 1, 2, 4, ... places further.
    """
    if hosts <= MANY_HOSTS:
        return [Flow(*pair) for pair in permutations(range(hosts), 2)]
    steps = [2**k for k in range((hosts - 1).bit_length())]
    ahead = {Flow(host, (host + step) % hosts) for host in range(hosts) for step in steps}
    return sorted(ahead | {Flow(flow.target, flow.source) for flow in ahead})


def tournament(order: Sequence[int]) -> list[list[Flow]]:
    """Rounds in which each host has at most one partner and every pair meets once, both ways at once.

    Neighbours in `order` meet in the first rounds. In round r place i meets place i XOR r: of two halves of the list all
    hosts then meet across in the same rounds, and load what joins the halves with everything they have.
    """
    places = 1 << max(0, len(order) - 1).bit_length()
    rounds = []
    for step in range(1, places):
        pairs = [(i, i ^ step) for i in range(len(order)) if i < i ^ step < len(order)]
        if pairs:
            rounds.append(both_ways((order[i], order[j]) for i, j in pairs))
    return rounds


def across(group: Sequence[int], others: Sequence[int], turn: int) -> list[Flow]:
    """As many hosts of a group as find a partner outside it, each with another one, both ways at once."""
    count = min(len(group), len(others))
    chosen = [others[(k + turn) % len(others)] for k in range(count)]
    return both_ways(zip(group, chosen, strict=False))


def both_ways(pairs: Iterable[tuple[int, int]]) -> list[Flow]:
    """Each pair as two flows."""
    return [flow for a, b in pairs for flow in (Flow(a, b), Flow(b, a))]

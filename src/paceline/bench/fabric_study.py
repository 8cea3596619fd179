"""Which flows are measured, and in what company, to tell a fabric's links and uplinks apart. Imports no torch.

A flow alone shows the slowest link on its way. All hosts at once, each with one partner, show what they share: hosts whose
flows keep their rate stand behind one switch, and where the rate falls an uplink lies between. Which hosts stand together
is inferred from that (`groups`), and then whole groups are set against each other (`across`), because a pair here and
there does not fill an uplink.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import combinations
from typing import Literal

import msgspec

from paceline.bench.pairs import Flow, Seen, across, each_alone, tournament

KEEPS = 0.8
"""Hosts belong together whose flows keep this share of their own links' rate while all others are busy too."""

DOUBTFUL = 0.85
"""Where any flow keeps less than that, hosts are measured once more, in an order of likeness."""

TURNS = 2
"""Times that a group is set against the others, each time with other partners."""

Company = Literal["alone", "together", "across"]

Measure = Callable[[Sequence[Flow], Company], list[Seen]]
"""Runs all these flows at once and returns what each receiver saw. Called alike by all ranks, with equal results."""


class Across(msgspec.Struct, frozen=True):
    """A group against hosts outside it, `turns` times."""

    group: int
    turns: list[list[Seen]]


class Study(msgspec.Struct):
    """What has been measured so far; it is filled in place, so that an interrupted one keeps what it has."""

    hosts: list[str]
    alone: list[Seen] = []
    together: list[Seen] = []
    groups: list[list[int]] = []
    across: list[Across] = []


def fill(study: Study, measure: Measure, doubted: Callable[[Study], set[int]]) -> None:
    """Measure a fabric.

    Args:
        measure: runs flows.
        doubted: hosts whose own links are at fault, as far as the flows alone tell; they say nothing about uplinks.
    """
    hosts = list(range(len(study.hosts)))
    for flow in each_alone(len(hosts)):
        study.alone += measure([flow], "alone")
    study.groups = [hosts]
    if len(hosts) < 3:
        return
    left_out = doubted(study)
    study.together = [seen for flows in tournament(hosts) for seen in measure(flows, "together")]
    kept = _kept(study)
    if len(hosts) > 4 and min(kept.values()) < DOUBTFUL:
        # Hosts behind one switch that are no neighbours in the list never met the others as a whole: now they do.
        order = _joined(kept, hosts, 0.0)[0]
        study.together = [seen for flows in tournament(order) for seen in measure(flows, "together")]
        kept = _kept(study)
    study.groups = find_groups(hosts, kept, left_out)
    _measure_across(study, measure, left_out)


def _measure_across(study: Study, measure: Measure, left_out: set[int]) -> None:
    sound = [[host for host in group if host not in left_out] for group in study.groups]
    numbers = list(range(len(sound)))
    if len(sound) == 2:
        # What the smaller one sends is what the other one is sent, and fills the uplink of the smaller one.
        numbers = [min(numbers, key=lambda number: len(sound[number]))]
    for number in numbers:
        others = [host for k, group in enumerate(sound) if k != number for host in group]
        if sound[number] and others:
            turns = [across(sound[number], others, turn) for turn in range(min(TURNS, len(others)))]
            study.across.append(Across(number, [measure(turn, "across") for turn in turns]))


def _kept(study: Study) -> dict[Flow, float]:
    """Share of what the two hosts' links can do, as far as known, that a flow had while all others were busy too."""
    out, into = capacities(study.alone)
    return {
        seen.flow: min(1.0, seen.bytes_per_second / min(out[seen.source], into[seen.target]))
        for seen in study.together
    }


def capacities(alone: Sequence[Seen]) -> tuple[dict[int, float], dict[int, float]]:
    """Bytes per second that each host's link can send, and take: at least what it did with its best partner."""
    out: dict[int, float] = {}
    into: dict[int, float] = {}
    for seen in alone:
        out[seen.source] = max(out.get(seen.source, 0.0), seen.bytes_per_second)
        into[seen.target] = max(into.get(seen.target, 0.0), seen.bytes_per_second)
    return out, into


def find_groups(hosts: Sequence[int], kept: dict[Flow, float], left_out: Collection[int] = ()) -> list[list[int]]:
    """Hosts that keep their rate among each other.

    Those that are `left_out` join the group that they keep most with, after the groups are made of the others alone.
    """
    groups = _joined(kept, [host for host in hosts if host not in left_out], KEEPS)
    for host in sorted(left_out):
        if groups:
            max(groups, key=lambda group: _closeness(kept, [host], group)).append(host)
    return sorted(sorted(group) for group in groups) or [list(hosts)]


def _joined(kept: dict[Flow, float], hosts: Sequence[int], least: float) -> list[list[int]]:
    """Groups joined two by two, the closest ones first (average linkage), while they keep at least that share."""
    groups = [[host] for host in hosts]
    while len(groups) > 1:
        pairs = list(combinations(range(len(groups)), 2))
        closeness = [_closeness(kept, groups[a], groups[b]) for a, b in pairs]
        if max(closeness) < least:
            break
        a, b = pairs[closeness.index(max(closeness))]
        groups[a] = groups[a] + groups.pop(b)
    return groups


def _closeness(kept: dict[Flow, float], some: Sequence[int], others: Sequence[int]) -> float:
    flows = [flow for a in some for b in others for flow in (Flow(a, b), Flow(b, a)) if flow in kept]
    return sum(kept[flow] for flow in flows) / len(flows) if flows else 0.0

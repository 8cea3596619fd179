"""Which flows are measured, and in what company, to tell a fabric's links and uplinks apart. Imports no torch.

A flow alone shows the slowest link on its way. All hosts at once, each with one partner, show what they share: hosts whose
flows keep their rate stand behind one switch, and where the rate falls an uplink lies between. Which hosts stand together
is inferred from that (`groups`), and then whole groups are set against each other (`across`), because a pair here and
there does not fill an uplink.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence, Set
from itertools import combinations
from typing import Literal

import msgspec

from paceline.bench.fabric_faults import LOSES, loses
from paceline.bench.pairs import MANY_HOSTS, Flow, Seen, across, each_alone, merged, tournament

KEEPS = 0.85
"""Hosts belong together whose flows keep this share of their own links' rate while all others are busy too."""

UNKNOWN = 0.9
"""How close hosts are taken to be of which nothing is known: less than where something speaks for it."""

SHUFFLES, SHUFFLES_OF_MANY = 5, 1
"""The more hosts, the more of them cross an uplink in any order."""

LIKENESS_PASSES = 3
REPEATS = 3
AGREES = 0.1
"""Two rates agree that differ by less than this share."""

TURNS = 3
"""Times that a group is set against the others, with other partners as far as there are any."""

Capacities = tuple[dict[int, float], dict[int, float]]
"""Bytes per second that each host's link can send, and take."""

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
    _repeat_doubtful(study, measure)
    study.groups = [hosts]
    if len(hosts) < 3:
        return
    left_out = doubted(study)
    can = capacities(study.alone)
    evidence: dict[Flow, float] = {}
    for order in _orders(hosts, evidence):
        for flows in tournament(order):
            seen = _best_of_round(flows, measure, can, left_out)
            study.together += seen
            _weigh(evidence, seen, can, left_out)
    study.groups = find_groups(hosts, evidence, left_out)
    _measure_across(study, measure, left_out)


def _repeat_doubtful(study: Study, measure: Measure) -> None:
    """Measure flows again that fall behind or lost something, until a figure comes twice: noise does not repeat itself."""
    rates = sorted(seen.bytes_per_second for seen in study.alone)
    usual = rates[-max(1, len(rates) // 4)]
    for place, first in enumerate(study.alone):
        seen = first
        for _ in range(REPEATS):
            losing = (seen.resent or 0.0) > LOSES
            if loses(seen) or (seen.bytes_per_second >= KEEPS * usual and not losing):
                break
            (again,) = measure([seen.flow], "alone")
            agree = abs(again.bytes_per_second / seen.bytes_per_second - 1) < AGREES
            seen = study.alone[place] = merged(seen, again)
            if agree and not losing:
                break


def _best_of_round(flows: Sequence[Flow], measure: Measure, can: Capacities, left_out: Set[int]) -> list[Seen]:
    """A round of all hosts; again where flows fall behind, since what else the machines do only takes."""
    seen = measure(flows, "together")
    for _ in range(REPEATS):
        if not _any_behind(_kept(seen, can), left_out):
            break
        again = measure(flows, "together")
        better = [merged(*both) for both in zip(seen, again, strict=True)]
        agree = all(b.bytes_per_second < (1 + AGREES) * a.bytes_per_second for a, b in zip(seen, better, strict=True))
        seen = better
        if agree:
            break
    return seen


def _measure_across(study: Study, measure: Measure, left_out: set[int]) -> None:
    sound = [[host for host in group if host not in left_out] for group in study.groups]
    numbers = list(range(len(sound)))
    if len(sound) == 2:
        # What the smaller one sends is what the other one is sent, and fills the uplink of the smaller one.
        numbers = [min(numbers, key=lambda number: len(sound[number]))]
    for number in numbers:
        others = [host for k, group in enumerate(sound) if k != number for host in group]
        if sound[number] and others:
            turns = [across(sound[number], others, turn) for turn in range(TURNS)]
            study.across.append(Across(number, [measure(turn, "across") for turn in turns]))


def _orders(hosts: list[int], evidence: dict[Flow, float]) -> Iterator[list[int]]:
    """Orders of hosts for tournaments: as they are, shuffled, and then in the order of likeness until that stays.

    Hosts behind one switch that are no neighbours in an order do not meet the others as a whole, and may not fill an uplink.
    """
    yield hosts
    if len(hosts) < 5:
        return
    for number in range(SHUFFLES if len(hosts) <= MANY_HOSTS else SHUFFLES_OF_MANY):
        yield random.Random(number).sample(hosts, len(hosts))
    before: list[int] = []
    for _ in range(LIKENESS_PASSES if evidence else 0):
        order = _joined(evidence, hosts, 0.0)[0]
        if order == before:
            return
        yield order
        before = order


def _weigh(evidence: dict[Flow, float], seen: Sequence[Seen], can: Capacities, left_out: Set[int]) -> None:
    """Add what one round tells: the least share of its two links' rate that a flow ever kept while all others were busy.

    A round in which all flows keep their rate tells nothing: none of the uplinks was full.
    """
    kept = _kept(seen, can)
    if _any_behind(kept, left_out):
        evidence.update({flow: min(share, evidence.get(flow, 1.0)) for flow, share in kept.items()})


def _any_behind(kept: dict[Flow, float], left_out: Set[int]) -> bool:
    return any(share < KEEPS for flow, share in kept.items() if not left_out & set(flow))


def _kept(seen: Sequence[Seen], can: Capacities) -> dict[Flow, float]:
    out, into = can
    return {one.flow: min(1.0, one.bytes_per_second / min(out[one.source], into[one.target])) for one in seen}


def capacities(alone: Sequence[Seen]) -> Capacities:
    """Bytes per second that each host's link can send, and take: at least what it did with its best partner."""
    out: dict[int, float] = {}
    into: dict[int, float] = {}
    for seen in alone:
        out[seen.source] = max(out.get(seen.source, 0.0), seen.bytes_per_second)
        into[seen.target] = max(into.get(seen.target, 0.0), seen.bytes_per_second)
    return out, into


def find_groups(hosts: Sequence[int], evidence: dict[Flow, float], left_out: Set[int] = frozenset()) -> list[list[int]]:
    """Hosts that keep their rate among each other.

    Those that are `left_out` join the group that they keep most with, after the groups are made of the others alone.
    """
    groups = _joined(evidence, [host for host in hosts if host not in left_out], KEEPS)
    for host in sorted(left_out):
        if groups:
            max(groups, key=lambda group: _closeness(evidence, [host], group)).append(host)
    return sorted(sorted(group) for group in groups) or [list(hosts)]


def _joined(evidence: dict[Flow, float], hosts: Sequence[int], least: float) -> list[list[int]]:
    """Groups joined two by two, the closest ones first (average linkage), while they keep at least that share."""
    groups = [[host] for host in hosts]
    while len(groups) > 1:
        pairs = list(combinations(range(len(groups)), 2))
        closeness = [_closeness(evidence, groups[a], groups[b]) for a, b in pairs]
        if max(closeness) < least:
            break
        a, b = pairs[closeness.index(max(closeness))]
        groups[a] = groups[a] + groups.pop(b)
    return groups


def _closeness(evidence: dict[Flow, float], some: Sequence[int], others: Sequence[int]) -> float:
    flows = [flow for a in some for b in others for flow in (Flow(a, b), Flow(b, a)) if flow in evidence]
    return sum(evidence[flow] for flow in flows) / len(flows) if flows else UNKNOWN

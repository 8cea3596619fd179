"""What a study of a fabric says: links and uplinks at fault, by host, and where to place ranks. Imports no torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from paceline.bench.fabric_faults import Blame, End, loses, lossy, rate_over, slow, usual_rates
from paceline.bench.fabric_study import Across, Study
from paceline.bench.pairs import Flow, Seen
from paceline.units import format_bandwidth, format_percent

OVERSUBSCRIBED = 1.25
"""An uplink is oversubscribed from here on: the hosts behind it together against what it carries."""

LIMITS = 0.85
"""An uplink is what limits where all flows over it together have less than this share of what each can do alone."""

PAGE = "docs/guide/fabric.md"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is wrong with a link: the same fields as `doctor`'s findings."""

    id: str
    severity: str
    host: str
    rank: int | None = None
    found: str
    why: str
    mend: str
    source: str


class Uplink(NamedTuple):
    """What lies between a group of hosts and the others."""

    group: int
    factor: float
    """What the group's links can carry together, over what the uplink does, in its worse direction."""
    error: float
    """Of the factor, in its own unit: one standard error."""
    out_bytes_per_second: float
    into_bytes_per_second: float


class Placement(msgspec.Struct, frozen=True):
    """How to place ranks on what was measured."""

    order: list[str]
    """Hosts so that neighbours share a switch."""
    groups: list[list[str]]
    leave_out: list[str]
    say: str


def doubted(study: Study) -> set[int]:
    """Hosts whose own links are at fault, judged by the flows alone."""
    losing = {end.host for end in lossy(study.alone).ends}
    everyone = [list(range(len(study.hosts)))]
    return losing | {end.host for end in slow(study.alone, everyone, losing, covers=1.0).ends}


def findings_of(study: Study) -> list[Finding]:
    """Everything that is wrong, worst first; empty where the fabric is sound."""
    losing = lossy(study.alone)
    left_out = _hosts(losing)
    slower = slow(study.alone, study.groups, left_out)
    return [
        *_loss_findings(study, losing),
        *_slow_findings(study, slower),
        *(
            _uplink_finding(study, uplink)
            for uplink in uplinks(study)
            if uplink.factor - uplink.error >= OVERSUBSCRIBED
        ),
    ]


def uplinks(study: Study) -> list[Uplink]:
    """The uplinks that limit what their group sends or is sent."""
    return [uplink for across in study.across if (uplink := _uplink(study, across)) is not None]


def placement_of(study: Study, findings: Sequence[Finding]) -> Placement:
    """Where to put what: talkative axes inside groups, hosts with bad links out."""
    bad = [host for host in study.hosts if any(f.host == host for f in findings)]
    groups = [[study.hosts[host] for host in group if study.hosts[host] not in bad] for group in study.groups]
    groups = [group for group in groups if group]
    order = [host for group in groups for host in group]
    lines = []
    if len(groups) > 1:
        names = " | ".join(" ".join(group) for group in groups)
        lines.append(
            f"Give ranks out in the order {' '.join(order)}, so that tp, pp, cp and dp_shard stay inside a group "
            f"({names}) and only dp_replicate crosses."
        )
    if bad:
        lines.append(f"Leave out {' '.join(bad)} until mended: every collective waits for its slowest link.")
    return Placement(order, groups, bad, " ".join(lines) or "Any order of hosts is as good as another.")


def _uplink(study: Study, across: Across) -> Uplink | None:
    group = study.groups[across.group]
    link, link_error = _link(study)
    ways = [_carried(study, across, leaving) for leaving in (True, False)]
    carried, error = min(ways)
    loading = len(across.turns[0]) / 2
    if carried >= LIMITS * loading * link:
        return None
    # The uplink of few hosts among many is full before that of the many is.
    behind = min(len(group), len(study.hosts) - len(group))
    factor = behind * link / carried
    return Uplink(across.group, factor, factor * math.hypot(error / carried, link_error), ways[0][0], ways[1][0])


def _carried(study: Study, across: Across, leaving: bool) -> tuple[float, float]:
    """Bytes per second that an uplink carries out of a group, or into it, and the standard error of that.

    Flows that share it leave a little of it unused while they find their shares; one flow alone may show more of it.
    """
    inside = set(study.groups[across.group])

    def crosses(seen: Seen) -> bool:
        return (seen.source in inside) == leaving and (seen.target in inside) != leaving

    crossing = [[seen for seen in turn if crosses(seen)] for turn in across.turns]
    sums = [sum(seen.bytes_per_second for seen in turn) for turn in crossing]
    errors = [math.hypot(*(seen.error * seen.bytes_per_second for seen in turn)) for turn in crossing]
    own = math.hypot(*errors) / len(errors)
    spread = statistics.stdev(sums) / math.sqrt(len(sums)) if len(sums) > 1 else 0.0
    alone = max((seen.bytes_per_second for seen in study.alone if crosses(seen)), default=0.0)
    return max(statistics.median(sums), alone), max(own, spread)


def _link(study: Study) -> tuple[float, float]:
    """Bytes per second of a sound link, and the error as a share: of flows inside groups, alone."""
    rate = _usual(study)
    near = [seen for seen in study.alone if abs(seen.bytes_per_second / rate - 1) < 0.1]
    share = statistics.median(seen.error for seen in near) / math.sqrt(len(near)) if near else 0.0
    return rate, share


def _usual(study: Study) -> float:
    usual = usual_rates(study.alone, study.groups)
    return usual.get(None) or max(usual.values())


def _hosts(blame: Blame) -> set[int]:
    return {end.host for end in blame.ends}


def _loss_findings(study: Study, blame: Blame) -> Iterator[Finding]:
    mend = "Look at the counters of `ip -s link` and `ethtool -S` on it and at its switch port; change cable or optics."
    why = "TCP halves its rate at a loss and RDMA sends a whole window again; every collective waits for that link."
    for host, ways in _by_host(blame.ends).items():
        over = [seen for seen in study.alone if any(end.has(seen.flow) for end in blame.ends if end.host == host)]
        yield Finding(
            id="link-loses", severity="error", host=study.hosts[host], why=why, mend=mend, source=PAGE,
            found=f"the link of {study.hosts[host]} loses frames{_way_words(ways)}: {_loss_words(over)}",
        )  # fmt: skip
    for flow in blame.paths:
        a, b = study.hosts[flow.source], study.hosts[flow.target]
        over = [seen for seen in study.alone if seen.flow == flow]
        yield Finding(
            id="path-loses", severity="warning", host=f"{a} {b}", why=why, mend=mend, source=PAGE,
            found=f"frames from {a} to {b} are lost: {_loss_words(over)}; other flows of both are sound",
        )  # fmt: skip


def _loss_words(over: Sequence[Seen]) -> str:
    shares = [seen.resent for seen in over if seen.resent is not None]
    bad = sum(1 for seen in over if loses(seen))
    stalled = format_percent(max(seen.stalled for seen in over))
    if not shares:
        return f"{bad} of {len(over)} flows over it stalled, up to {stalled} of the time"
    sent_again = format_percent(statistics.median(shares))
    return f"{sent_again} of what was sent over it had to be sent again, with nothing else under way; stalls up to {stalled}"


def _slow_findings(study: Study, blame: Blame) -> Iterator[Finding]:
    best = _usual(study)
    for host, ways in _by_host(blame.ends).items():
        name = study.hosts[host]
        rate = min(rate_over(End(host, way), study.alone) for way in ways)
        one_way = len(ways) == 1
        yield Finding(
            id="link-asymmetric" if one_way else "link-slow", severity="error", host=name, source=PAGE,
            found=f"the link of {name} is slow{_way_words(ways)}: {format_bandwidth(rate)} where others have "
            f"{format_bandwidth(best)}, a factor of {best / rate:.1f}",
            why=f"A ring runs as fast as its slowest link: collectives over all hosts take {best / rate:.1f} times as long.",
            mend=f"On {name}: `ethtool` shows the speed that the port agreed on, `tc qdisc show` what is shaped; "
            "change cable or port, or leave the host out.",
        )  # fmt: skip
    for flow in blame.paths:
        a, b = study.hosts[flow.source], study.hosts[flow.target]
        rate = rate_of(study.alone, flow)
        yield Finding(
            id="path-slow", severity="warning", host=f"{a} {b}", source=PAGE,
            found=f"the path from {a} to {b} is slow: {format_bandwidth(rate)} where its like have {format_bandwidth(best)}",
            why=f"A ring with this pair as neighbours takes up to {best / rate:.1f} times as long.",
            mend="Place ranks so that the two are no neighbours; look at the route between them.",
        )  # fmt: skip


def rate_of(alone: Sequence[Seen], flow: Flow) -> float:
    """Bytes per second of one flow."""
    return next(seen.bytes_per_second for seen in alone if seen.flow == flow)


def _uplink_finding(study: Study, uplink: Uplink) -> Finding:
    group = " ".join(study.hosts[host] for host in study.groups[uplink.group])
    rest = [host for k, hosts in enumerate(study.groups) if k != uplink.group for host in hosts]
    others = " ".join(study.hosts[host] for host in rest)
    out, into = uplink.out_bytes_per_second, uplink.into_bytes_per_second
    return Finding(
        id="uplink-oversubscribed", severity="warning", host=f"uplink of {group}", source=PAGE,
        found=f"the uplink between {group} and {others} carries {format_bandwidth(out)} out and {format_bandwidth(into)} "
        f"in: oversubscribed {uplink.factor:.1f} +- {uplink.error:.1f} to 1",
        why=f"Traffic of all hosts across it at once has 1/{uplink.factor:.1f} of their links; inside a group all of it.",
        mend="Keep tp, pp, cp and dp_shard inside a group and let only dp_replicate cross; see the placement.",
    )  # fmt: skip


def _by_host(ends: Sequence[End]) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for end in ends:
        found.setdefault(end.host, []).append(end.way)
    return found


def _way_words(ways: Sequence[str]) -> str:
    if len(ways) > 1:
        return " both ways"
    return " in what it sends" if ways[0] == "out" else " in what it is sent"

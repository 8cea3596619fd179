"""Which rank is slower than its peers, and why: from each rank's own work, never from the step's time. No torch.

In a synchronous step all ranks take equally long, since the quick ones wait for the slow one. What tells them apart is
what each does before it waits: `own` work is all of a step but the waits for others, those inside of forward and backward
as well. Who comes last to each exchange waits least. With the median of the peers' as reference,

    score = reference / own        1: like its peers; 0.5: twice as long; below `THRESHOLD` in `WINDOWS` windows: a straggler

The cause is the part that makes most of the difference: `compute` (forward, backward, update), `data` (waiting for its own
loader) or `storage` (writing records). Where nobody's own work stands out and all wait longer than they used to, it is a
`link`, named by the connections that were slow while they were busy. Ranks are compared with those that do the same work.

Source of the score and of its threshold: the relative performance of nvidia-resiliency-ext's straggler reports.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from paceline.units import format_bandwidth, format_seconds

THRESHOLD = 0.7
WINDOWS = 2
"""Windows in a row that must agree."""

LEAST_SECONDS = 1e-3
"""A difference of own work below this is the noise of a clock and of a scheduler."""

LINK_GROWTH = 2.0
"""A link is slow where the waits have grown to this many times the median of the windows before, ..."""
LINK_SHARE = 0.3
"""... and make this share of the step."""
LINK_BUSY = 0.1
"""Connections count where they were busy for this share of the time."""

Cause = Literal["compute", "data", "storage", "link"]

CAUSE_OF: dict[str, Cause] = {
    "forward": "compute", "backward": "compute", "optimizer": "compute", "data_wait": "data", "telemetry": "storage",
}  # fmt: skip
OWN: tuple[Cause, ...] = ("compute", "data", "storage")
WAITS = ("reduce_exposed", "bubble")


class Work(NamedTuple):
    """Mean seconds of a step of one rank in one window, its longest step left out.

    own: by cause. waits: for other ranks. cpu_share: processor time over own work; probe_seconds: of a small
    product of matrices, the same one on all ranks; rates: bytes per second by peer's address while sending; held_back: by a
    CPU quota, which is own work however much of it was waited elsewhere. None, empty or 0 where not measured.
    """

    own: Mapping[str, float]
    waits: float
    host: str = ""
    cpu_share: float | None = None
    probe_seconds: float | None = None
    address: str = ""
    rates: Mapping[str, float] = {}
    held_back: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.own.values())


class Finding(NamedTuple):
    """A straggler. rank: None where a link is slow and no rank can be named."""

    rank: int | None
    host: str
    cause: Cause
    score: float
    evidence: str


def work_of(window: Mapping[str, Any]) -> Work:
    """What a `window` record says of its rank."""
    own: dict[str, float] = dict.fromkeys(OWN, 0.0)
    waits = 0.0
    without_waits = window.get("own") or {}
    for part, summary in window["parts"].items():
        seconds = _mean(summary)
        if part in WAITS:
            waits += seconds
        elif part in CAUSE_OF:
            worked = min(seconds, _mean(without_waits.get(part, summary)))
            own[CAUSE_OF[part]] += worked
            waits += seconds - worked
    total, steps = sum(own.values()), max((int(s["count"]) for s in window["parts"].values()), default=0)
    held = (window.get("held_back_seconds") or 0.0) / max(1, steps)
    # It stood still in an exchange, and seems to have waited there for the ranks that waited for it.
    hidden = max(0.0, min(held, total + waits) - total)
    own["compute"], waits, total = own["compute"] + hidden, max(0.0, waits - hidden), total + hidden
    cpu = window.get("cpu_seconds")
    share = cpu / (steps * total) if cpu is not None and steps and total > 0 else None
    busy = {peer: sent / spent for peer, (sent, spent) in (window.get("links") or {}).items() if spent > 0}
    return Work(
        own, waits, str(window.get("host", "")), share, window.get("probe_seconds"),
        str(window.get("address") or ""), busy, held,
    )  # fmt: skip


def find(windows: Sequence[Mapping[int, Work]], like: Sequence[Sequence[int]]) -> list[Finding]:
    """The stragglers of the newest window.

    Args:
        windows: work by rank, of the windows of one attempt in order, without those that warm up.
        like: groups of ranks that do the same work; those of a pipeline's stages are apart.
    """
    recent = windows[-WINDOWS:]
    if len(recent) < WINDOWS:
        return []
    peers = [(rank, ranks) for ranks in like for rank in ranks if len(ranks) > 1]
    found = [_slow(rank, ranks, recent) for rank, ranks in peers if _is_slow(rank, ranks, recent)]
    if found or any(_is_slow(rank, ranks, recent[-1:]) for rank, ranks in peers):
        # For a rank that seems slow all others wait as they would for a link: the next window tells which it is.
        return found
    return _link(windows)


def score(rank: int, ranks: Sequence[int], window: Mapping[int, Work]) -> float:
    """Of a rank among those like it: the median of its peers' own work over its own."""
    own = window[rank].total
    return _reference(rank, ranks, window) / own if own > 0 else 1.0


def _is_slow(rank: int, ranks: Sequence[int], recent: Sequence[Mapping[int, Work]]) -> bool:
    return all(
        score(rank, ranks, window) < THRESHOLD and window[rank].total - _reference(rank, ranks, window) > LEAST_SECONDS
        for window in recent
    )


def _slow(rank: int, ranks: Sequence[int], recent: Sequence[Mapping[int, Work]]) -> Finding:
    excess: dict[Cause, float] = {
        cause: statistics.fmean(
            w[rank].own[cause] - statistics.median(w[peer].own[cause] for peer in ranks if peer != rank) for w in recent
        )
        for cause in OWN
    }
    cause = max(excess, key=lambda name: excess[name])
    last = recent[-1]
    told = (
        f"own work of a step {format_seconds(last[rank].total)}, its peers' {format_seconds(_reference(rank, ranks, last))}; "
        f"it waits {format_seconds(last[rank].waits)} for them, they "
        f"{format_seconds(statistics.median(last[p].waits for p in ranks if p != rank))}"
    )
    more = _cross_check(last[rank], [last[p] for p in ranks if p != rank]) if cause == "compute" else ""
    # Of the newest window: a part of the first one may have been before it began.
    return Finding(rank, last[rank].host, cause, score(rank, ranks, last), told + more)


def _cross_check(own: Work, peers: Sequence[Work]) -> str:
    """What a short measurement says of a slow computation: a processor that is taken away, or one that is slow itself."""
    text = ""
    known = [p.probe_seconds for p in peers if p.probe_seconds]
    if own.probe_seconds and known:
        text += f"; a small product takes {own.probe_seconds / statistics.median(known):.2f} times as long"
    shares = [p.cpu_share for p in peers if p.cpu_share]
    if own.cpu_share and shares:
        usual = statistics.median(shares)
        text += f"; its processor is at work for {own.cpu_share:.2f} of that, its peers' for {usual:.2f}"
        if own.cpu_share < THRESHOLD * usual:
            text += ": something takes its processor away, or it sleeps"
    if own.held_back > LEAST_SECONDS:
        text += f"; a CPU quota holds it back for {format_seconds(own.held_back)} of a step"
    return text


def _link(windows: Sequence[Mapping[int, Work]]) -> list[Finding]:
    """All ranks wait longer than they used to, and none for another one's work."""
    means = [(statistics.fmean(w.waits for w in window.values()), _step(window)) for window in windows]
    if len(means) <= WINDOWS:
        return []
    usual = statistics.median(waits for waits, _ in means[:-WINDOWS])
    if not all(w > LINK_GROWTH * usual and w > LINK_SHARE * step for w, step in means[-WINDOWS:]):
        return []
    last = windows[-1]
    waits = means[-1][0]
    told = f"all ranks wait {format_seconds(waits)} a step for others, {format_seconds(usual)} before"
    rank, rate = _slowest_end(last)
    if rank is None or rate is None:
        return [Finding(None, "", "link", usual / waits, told)]
    more = f"; its connections send {format_bandwidth(rate)} while they are busy, the fewest of all"
    return [Finding(rank, last[rank].host, "link", usual / waits, told + more)]


def _slowest_end(window: Mapping[int, Work]) -> tuple[int | None, float | None]:
    """The rank at whose link the slowest connections end, and their rate; None where all of them are on one address."""
    by_address = {work.address: rank for rank, work in window.items() if work.address}
    if len(by_address) < 2:
        return None, None
    ends: dict[int, list[float]] = {}
    for rank, work in window.items():
        for peer, rate in work.rates.items():
            for end in (rank, by_address.get(peer)):
                if end is not None:
                    ends.setdefault(end, []).append(rate)
    if not ends:
        return None, None
    # A sound rank has a quick connection too, unless it talks to the slow one alone.
    slowest = min(ends, key=lambda rank: statistics.median(ends[rank]))
    return slowest, statistics.median(ends[slowest])


def _step(window: Mapping[int, Work]) -> float:
    return statistics.fmean(work.total + work.waits for work in window.values())


def _reference(rank: int, ranks: Sequence[int], window: Mapping[int, Work]) -> float:
    return statistics.median(window[peer].total for peer in ranks if peer != rank)


def _mean(summary: Mapping[str, Any]) -> float:
    """Of a part's seconds, without its longest: an evaluation's end or a collection of garbage hits one step."""
    count = int(summary["count"])
    return (summary["sum"] - summary["max"]) / (count - 1) if count > 1 else float(summary["sum"])

"""What a sweep's figures mean: wrong results, a share of what the link gives, a change since a stored result. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from paceline.bench.rows import GB, Row
from paceline.cluster.device import Link
from paceline.cluster.measured import IN_NODE
from paceline.parallel.wire import GLOO, GLOO_REDUCE_SCATTER
from paceline.units import MiB, format_bytes, format_percent

LOW_SHARE = 0.7
"""Below this share of what the link gives something is wrong with the machine or its settings."""

ABOVE_RING = 1.05
"""An all-reduce faster than a ring can be by this factor is summed in the network."""

LARGE_ENOUGH = 16 * MiB
"""Smaller sizes do not fill a link between devices, so their share says nothing."""

BUSY_SHARE = 0.5
"""Processes per CPU in the last minute above which figures are not the machine's own."""

CHANGE = 0.10
"""A change since a stored result counts from here on, and above both spreads."""


class Remark(msgspec.Struct, frozen=True):
    """One sentence about a result, with its values; `problem` where something is to be mended."""

    id: str
    message: str
    problem: bool
    values: dict[str, Any] = {}


def about_backend(about: Mapping[str, Any], rows: Sequence[Row]) -> list[Remark]:
    """What must be known to read figures of Gloo."""
    if about.get("backend") != GLOO:
        return []
    found = [
        Remark(
            "not_representative",
            "Gloo on CPUs: these figures say nothing about NCCL on GPUs, neither their size nor their order",
            False,
            {"backend": GLOO},
        )
    ]
    if any(row.collective == "reduce_scatter" for row in rows):
        found.append(Remark("reduce_scatter_bytes", GLOO_REDUCE_SCATTER, False))
    return found


def busy(load: float, cores: int) -> list[Remark]:
    """Whether other work took the processors before the measurement began: `load` processes ran or waited, on average."""
    if load <= BUSY_SHARE * cores:
        return []
    message = (
        f"{load:.1f} processes ran or waited on this host's {cores} CPU{'s' * (cores > 1)} before the start: the figures are "
        "those of a busy machine"
    )
    return [Remark("busy", message, False, {"load": load, "cores": cores})]


def wrong_results(rows: Sequence[Row]) -> list[Remark]:
    """Sizes whose result was wrong."""
    return [
        Remark(
            "wrong",
            f"{row.collective} of {format_bytes(row.size_bytes)} ({row.tier}) gave {row.wrong} wrong elements",
            True,
            {**_where(row), "wrong": row.wrong},
        )
        for row in rows
        if row.wrong
    ]


def against_link(rows: Sequence[Row], link: Link | None, device: str) -> list[Remark]:
    """The largest all-reduce in the node as a share of what the catalogue's link gives; never more than all of it."""
    found = [row for row in rows if (row.collective, row.tier) == ("all_reduce", IN_NODE)]
    if link is None or not found or found[-1].size_bytes < LARGE_ENOUGH:
        return []
    row = max(found, key=lambda r: r.bus_bandwidth)
    promised = link.reached_bytes_per_second / GB
    values = {
        "bus_bandwidth": row.bus_bandwidth,
        "size_bytes": row.size_bytes,
        "promised": promised,
        "source": link.source,
    }
    measured = f"all_reduce of {format_bytes(row.size_bytes)}: {_rate(row.bus_bandwidth)} GB/s"
    if row.bus_bandwidth > ABOVE_RING * promised:
        message = (
            f"{measured} are more than the {_rate(promised)} GB/s that {link.name} gives a ring on {device}: in-network "
            f"reduction (NVLS or SHARP) is likely, and bus bandwidth is then not the bandwidth on the wire"
        )
        return [Remark("in_network", message, False, values)]
    share = min(1.0, row.bus_bandwidth / promised)
    values["share"] = share
    message = f"{measured} is {share:.0%} of what {link.name} gives on {device} ({_rate(promised)} GB/s)"
    return [Remark("share_of_link", message, share < LOW_SHARE, values)]


def against_baseline(rows: Sequence[Row], baseline: Mapping[str, Any]) -> list[Remark]:
    """Sizes that are slower or faster than in a stored result by more than `CHANGE` and more than both spreads."""
    before = {row.key: row for row in map(_row, baseline["rows"])}
    date = str(baseline.get("date", "an unknown date"))[:10]
    found = []
    for row in rows:
        then = before.get(row.key)
        if then is None or (then.ranks, then.type) != (row.ranks, row.type):
            continue
        change = row.time_us / then.time_us - 1
        if abs(change) <= max(CHANGE, row.spread + then.spread):
            continue
        slower = change > 0
        share = change if slower else then.time_us / row.time_us - 1
        found.append(
            Remark(
                "slower" if slower else "faster",
                f"{row.collective} of {format_bytes(row.size_bytes)} ({row.tier}) is {share:.0%} "
                f"{'slower' if slower else 'faster'} than on {date}: {row.time_us:.0f} us, then {then.time_us:.0f}",
                slower,
                {**_where(row), "change": change, "date": date},
            )
        )
    return found


def spread_remark(rows: Sequence[Row]) -> str:
    """The spread of a sweep in words."""
    if not rows:
        return "no rows"
    shares = sorted(row.spread for row in rows)
    worst = max(rows, key=lambda r: r.spread)
    return (
        f"spread (half the quartile distance): median {format_percent(shares[len(shares) // 2])}, largest "
        f"{format_percent(worst.spread)} ({worst.collective}, {format_bytes(worst.size_bytes)})"
    )


def _row(record: Mapping[str, Any]) -> Row:
    return msgspec.convert(record, Row)


def _where(row: Row) -> dict[str, Any]:
    return {"collective": row.collective, "tier": row.tier, "size_bytes": row.size_bytes}


def _rate(gigabytes: float) -> str:
    return f"{gigabytes:.0f}" if gigabytes >= 10 else f"{gigabytes:.2f}"

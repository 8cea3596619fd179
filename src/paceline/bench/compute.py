"""`paceline bench compute`: the rates of this host's devices, all at work at once. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.bench.ranks import collect, default_procs
from paceline.bench.result import Result, result_of
from paceline.cluster.measured import Compute, Curve, save_measured
from paceline.cluster.probe import probe_host
from paceline.errors import PacelineError
from paceline.units import format_bandwidth, format_flop_rate, format_percent, format_seconds

MODULE = "paceline.bench.compute_rank"
CURVES = ("matmul", "attention")


def measure(
    *,
    procs: int | None,
    dtypes: Sequence[str],
    iterations: int,
    seconds: float,
    device: str | None,
    say: Callable[[str], None],
) -> Result | None:
    """Measure on `procs` ranks; None on ranks other than 0.

    Args:
        dtypes: types of products; none for those of this kind of device.
        seconds: longest time for one row.
    """
    host = probe_host()
    given = {"dtypes": list(dtypes), "iterations": iterations, "seconds": seconds, "device": device}

    def tell(record: dict[str, Any]) -> None:
        # Rows come anew with each round; the first time shows how far it is.
        if record["kind"] == "row" and record["trials"] == 1:
            say(line(record))

    told = collect(MODULE, given, procs if procs is not None else default_procs(host, device), tell=tell)
    if told is None:
        return None
    result = result_of("compute", told, host=host.name)
    return result._replace(rows=list({(r["operation"], r["dtype"], r["size"]): r for r in result.rows}.values()))


def line(row: dict[str, Any]) -> str:
    """One row in words."""
    rate = (
        format_flop_rate(row["flop_per_second"])
        if row["flop_per_second"]
        else format_bandwidth(row["bytes_per_second"])
        if row["bytes_per_second"]
        else ""
    )
    time = format_seconds(row["time_us"] * 1e-6)
    size = f"{row['dtype']:<5} {row['size']:>10}"
    return f"{row['operation']:<10} {size}  {time:>9}  {rate:>14}  +- {format_percent(row['spread'])}".rstrip()


def describe(result: Result) -> Iterator[str]:
    """The rows as text."""
    about = result.about
    if about:
        ranks, threads = about.get("ranks"), about.get("threads")
        yield f"{about.get('device')}: {ranks} ranks at once, {threads} threads each; rates of one rank"
        yield "operation  type        size       time            rate  spread"
    yield from map(line, result.rows)


def save(path: Path, result: Result) -> None:
    """Write the rates into a measured cluster's file.

    Raises:
        PacelineError: the measurement is not complete.
    """
    rows = {row["operation"]: row for row in result.rows}
    if "launch" not in rows:
        raise PacelineError("the measurement ended early, so nothing was saved", key="--save")
    part = Compute(
        date=result.date, command=result.command, curves=tuple(curves(result.rows)),
        memory_bytes_per_second=rows["copy"]["bytes_per_second"], launch_seconds=rows["launch"]["time_us"] * 1e-6,
    )  # fmt: skip
    save_measured(path, probe_host(), 1, result.about["ranks"], compute=part)


def curves(rows: Sequence[dict[str, Any]]) -> Iterator[Curve]:
    """A curve per operation and type."""
    keys = dict.fromkeys((row["operation"], row["dtype"]) for row in rows if row["operation"] in CURVES)
    for operation, dtype in keys:
        own = [row for row in rows if (row["operation"], row["dtype"]) == (operation, dtype)]
        yield Curve(
            operation=operation, dtype=dtype, sizes=tuple(row["size"] for row in own),
            rates=tuple(row["flop_per_second"] for row in own), spreads=tuple(row["spread"] for row in own),
        )  # fmt: skip

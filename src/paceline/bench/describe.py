"""A sweep as text: nccl-tests' head and columns per collective and tier, the fits, the pairs, and what it means. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from paceline.bench.remarks import spread_remark
from paceline.bench.render import text_table
from paceline.cluster.measured import Fit
from paceline.units import format_bandwidth, format_bytes, format_percent, format_seconds

if TYPE_CHECKING:
    from paceline.bench.collectives import Measured


def describe(measured: Measured) -> Iterator[str]:
    """The lines of `bench collectives`."""
    if not measured.about:
        return
    yield from _head(measured)
    groups = list(dict.fromkeys((row.tier, row.collective) for row in measured.rows))
    for tier, collective in groups:
        rows = [row for row in measured.rows if (row.tier, row.collective) == (tier, collective)]
        yield "#"
        yield f"# {collective}, {tier}: {rows[0].ranks} ranks on {rows[0].nodes} node{'s' * (rows[0].nodes > 1)}"
        yield from text_table(rows)
    yield "#"
    yield f"# {spread_remark(measured.rows)}"
    yield from _fits(measured.fits)
    yield from _matrix(measured.pairs)
    for remark in measured.remarks:
        yield f"# {'PROBLEM: ' if remark.problem else ''}{remark.message}"
    if measured.error is not None:
        yield f"# incomplete: {len(measured.rows)} of {measured.expected_rows} rows"


def _head(measured: Measured) -> Iterator[str]:
    options, about = measured.options, measured.about
    yield (
        f"# nThread 1 nGpus 1 minBytes {options.min_bytes} maxBytes {options.max_bytes} step: {options.factor}(factor) "
        f"warmup iters: {options.warmup} iters: {options.iterations} agg iters: 1 validation: 1 graph: 0"
    )
    yield "#"
    yield "# Using devices"
    for place in about["ranks"]:
        yield f"#  Rank {place['rank']:>2} Pid {place['pid']:>6} on {place['node']:>10} device {place['device']}"
    nccl = f", NCCL {about['nccl']}" if about.get("nccl") else ""
    yield f"#  {about['backend']}, torch {about['torch']}{nccl}, Python {about['python']}"


def _fits(fits: Sequence[Fit]) -> Iterator[str]:
    if not fits:
        return
    yield "#"
    yield "# fitted: time = latency + size / bandwidth (algorithm bandwidth; the pieces stand in --json)"
    for fit in fits:
        error = (
            "no size from 64 KiB" if fit.relative_error is None else f"{format_percent(fit.relative_error)} from 64 KiB"
        )
        pieces = f", {len(fit.pieces)} pieces" if len(fit.pieces) > 1 else ""
        yield (
            f"#   {fit.collective:<14} {fit.tier:<12} latency {format_seconds(fit.latency_seconds):>8}  bandwidth "
            f"{format_bandwidth(fit.bytes_per_second):>10}  stated error {error}{pieces}"
        )


def _matrix(pairs: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Each ordered pair alone, GB/s in one direction: rows send, columns receive."""
    if not pairs:
        return
    ranks = sorted({pair["source"] for pair in pairs})
    rates = {(pair["source"], pair["target"]): pair["algorithm_bandwidth"] for pair in pairs}
    yield "#"
    yield f"# pairs of ranks alone, {format_bytes(pairs[0]['size_bytes'])}, GB/s from the row's rank to the column's"
    yield "#        " + "".join(f"{rank:>8}" for rank in ranks)
    for source in ranks:
        cells = "".join(
            f"{rates[source, target]:>8.3f}" if (source, target) in rates else f"{'-':>8}" for target in ranks
        )
        yield f"#  {source:>5} {cells}"

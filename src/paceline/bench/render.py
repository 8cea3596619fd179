"""Rows as text in nccl-tests' columns, as Markdown and as CSV. No torch."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

import msgspec

from paceline.bench.rows import Row
from paceline.units import format_bytes

_WIDTHS = (12, 8, 6, 6, *(7, 6, 6, 6) * 2)
"""Of all columns but the first, which are 12 wide and begin with the comment sign in the head."""

_MEASURED = ("time", "algbw", "busbw", "#wrong")
_UNITS = ("(us)", "(GB/s)", "(GB/s)", "")


def _head_line(*names: str) -> str:
    cells = [f"# {names[0]:>10}", *(f"{name:>{width}}" for name, width in zip(names[1:], _WIDTHS, strict=True))]
    return "  ".join(cells)


_HEAD = (
    f"#{'out-of-place':>71}{'in-place':>31}",
    _head_line("size", "count", "type", "redop", "root", *_MEASURED, *_MEASURED),
    _head_line("(B)", "(elements)", "", "", "", *_UNITS, *_UNITS).rstrip(),
)
_ABSENT = "  ".join(("    N/A", "   N/A", "   N/A", "   N/A"))


def text_table(rows: Sequence[Row]) -> list[str]:
    """The rows of one collective in nccl-tests' columns, with their trailer.

    torch reduces and broadcasts in place and does all else out of place: the other group of columns says N/A.
    """
    lines = [*_HEAD]
    for row in rows:
        measured = (
            f"{_number(row.time_us, 7)}  {_number(row.algorithm_bandwidth, 6)}  {_number(row.bus_bandwidth, 6)}"
            f"  {row.wrong:>6}"
        )
        groups = (_ABSENT, measured) if row.in_place else (measured, _ABSENT)
        lines.append(
            f"{row.size_bytes:>12}  {row.count:>12}  {row.type:>8}  {row.redop:>6}  {row.root:>6}  {groups[0]}  {groups[1]}"
        )
    wrong = sum(row.wrong for row in rows)
    mean = sum(row.bus_bandwidth for row in rows) / len(rows) if rows else 0.0
    lines.append(f"# Out of bounds values : {wrong} {'OK' if wrong == 0 else 'FAILED'}")
    lines.append(f"# Avg bus bandwidth    : {mean:.6g}")
    return lines


def markdown_table(rows: Sequence[Row]) -> list[str]:
    """All rows as one Markdown table; no bandwidth without its size."""
    lines = [
        "| collective | tier | ranks | size | time (us) | algbw (GB/s) | busbw (GB/s) | spread | wrong |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        cells = (
            row.collective, row.tier, str(row.ranks), format_bytes(row.size_bytes), f"{row.time_us:.1f}",
            f"{row.algorithm_bandwidth:.3f}", f"{row.bus_bandwidth:.3f}", f"{row.spread:.1%}", str(row.wrong),
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def csv_table(rows: Sequence[Row]) -> str:
    """All rows with all fields, a header line first."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = [field.name for field in msgspec.structs.fields(Row)]
    writer.writerow(names)
    writer.writerows([getattr(row, name) for name in names] for row in rows)
    return out.getvalue()


def _number(value: float, width: int) -> str:
    """A number in `width` characters with as many digits as fit, two after the point at most."""
    whole = len(str(int(value)))
    digits = 2 if whole < width - 2 else 1 if whole < width - 1 else 0
    return f"{value:>{width}.{digits}f}"

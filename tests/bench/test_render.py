"""Rows as text, CSV and Markdown: nccl-tests' columns, and the same figures in each."""

from __future__ import annotations

import csv

from paceline.bench.render import csv_table, markdown_table, text_table
from paceline.bench.rows import Row, make_row
from paceline.bench.sweep import Point

MEASURED = ["time", "algbw", "busbw", "#wrong"]


def rows(collective: str) -> list[Row]:
    sizes = (1024, 4096, 1 << 30)
    return [
        make_row(Point(collective, size, size // 8), "in_node", 4, 1, "bf16", [[size * 1e-9], [size * 1e-9]], 0)  # type: ignore[arg-type]
        for size in sizes
    ]


def cells(lines: list[str]) -> list[list[str]]:
    return [line.split() for line in lines if not line.startswith("#")]


def test_text_has_nccl_tests_columns_and_trailer() -> None:
    lines = text_table(rows("all_gather"))
    head = next(line for line in lines if "redop" in line)
    assert head.split() == ["#", "size", "count", "type", "redop", "root", *MEASURED, *MEASURED]
    for row, size in zip(cells(lines), (1024, 4096, 1 << 30), strict=True):
        assert row[:5] == [str(size), str(size // 8), "bfloat16", "none", "-1"]
        # 1 GB/s, of which 3/4 are bus bandwidth; nothing is in place.
        assert row[6:9] == ["1.00", "0.75", "0"] and row[9:] == ["N/A"] * 4
    assert cells(lines)[2][5] == "1073742"
    assert lines[-2] == "# Out of bounds values : 0 OK" and lines[-1] == "# Avg bus bandwidth    : 0.75"


def test_what_torch_does_in_place_stands_under_in_place() -> None:
    (first, *_) = cells(text_table(rows("all_reduce")))
    assert first[3:5] == ["sum", "-1"] and first[5:9] == ["N/A"] * 4 and first[10:12] == ["1.00", "1.50"]
    (first, *_) = cells(text_table(rows("broadcast")))
    assert first[3:5] == ["none", "0"] and first[10:12] == ["1.00", "1.00"]


def test_columns_stay_under_their_heads() -> None:
    lines = text_table(rows("reduce_scatter"))
    assert {len(line) for line in lines if not line.startswith("#")} == {len(lines[1])}
    assert lines[1].index(" time") + 5 == lines[3].index("1.02") + 4 == lines[2].index("(us)") + 4


def test_wrong_elements_are_counted_in_the_trailer() -> None:
    bad = make_row(Point("all_reduce", 64, 16), "in_node", 2, 1, "fp32", [[1e-6]], 5)
    assert text_table([bad])[-2] == "# Out of bounds values : 5 FAILED"


def test_csv_and_markdown_have_the_same_rows() -> None:
    made = rows("all_to_all")
    read = list(csv.DictReader(csv_table(made).splitlines()))
    assert [int(row["size_bytes"]) for row in read] == [row.size_bytes for row in made]
    assert [float(row["bus_bandwidth"]) for row in read] == [row.bus_bandwidth for row in made]
    lines = markdown_table(made)
    assert len(lines) == 5 and lines[2].startswith("| all_to_all | in_node | 4 | 1.00 KiB | 1.0 | 1.000 | 0.750 |")

"""A line of published runs with a figure that cannot be keeps its place in the scoreboard, with a reason, in little time."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.plan.against import scoreboard
from paceline.plan.rows import read_run

GOLDEN = Path(__file__).parent.parent / "golden/published_runs.jsonl"
ODD: tuple[Any, ...] = (None, 0, -1, 7.5, "x", [], {}, True, 1e30)


def lines(*wanted: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in GOLDEN.read_text().splitlines()]
    return [row for row in found if row["id"] in wanted]


@pytest.mark.limit(60)
@pytest.mark.parametrize("name", ["bigscience-l948", "zerobubble-6.2b-m24-1f1b-i", "torchtitan-70b-2d"])
def test_any_odd_value_in_any_field_gives_rows_and_no_traceback(name: str) -> None:
    (row,) = lines(name)
    for part in ("hardware", "model", "parallelism", "measured", None):
        for key in row if part is None else row[part]:
            for value in ODD:
                changed = copy.deepcopy(row)
                (changed if part is None else changed[part])[key] = value
                document = scoreboard([read_run(json.dumps(changed))])
                json.dumps(document, allow_nan=False)
                assert document["rows"], f"{part} {key} {value!r}"
                for one in document["rows"]:
                    assert one["predicted"] is not None or one["reason"], f"{part} {key} {value!r}: {one}"

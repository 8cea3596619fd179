"""What a program keeps."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.record import Figure, load_figures, save, table

FIGURES = [Figure("ratio", ">= 0.99", "1.002", True), Figure("seconds", "<= 1", "1.4", False), Figure("rate", "", "5")]


def test_the_table_shows_each_verdict() -> None:
    lines = table(FIGURES).splitlines()
    assert [line.split()[-1] for line in lines] == ["verdict", "reached", "short", "-"]
    assert len({line.index(word) for line, word in zip(lines[1:], (">= 0.99", "<= 1"), strict=False)}) == 1


def test_a_result_names_commit_machine_and_job_and_reads_back(tmp_path: Path) -> None:
    path = save("x", FIGURES, {"pairs": 12}, job=["a=1"], quick=False, output=tmp_path / "x.json")
    document = json.loads(path.read_text())
    assert document["commit"] and document["machine"]["cores"] >= 1 and document["versions"]["torch"]
    assert document["job"] == ["a=1"]
    assert load_figures(path) == FIGURES

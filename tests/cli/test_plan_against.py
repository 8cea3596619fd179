"""`paceline plan --against`: the document, the text, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import main

GOLDEN = Path(__file__).parents[1] / "golden" / "published_runs.jsonl"
KEYS = {"id", "quantity", "measured", "predicted", "predicted_calibrated", "relative_error", "reason"}


@pytest.fixture
def few(tmp_path: Path) -> str:
    """A file of ten lines."""
    path = tmp_path / "runs.jsonl"
    path.write_text("\n".join(GOLDEN.read_text(encoding="utf-8").splitlines()[:10]) + "\n")
    return str(path)


def test_the_document_has_what_the_contract_names(few: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--against", few, "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    steps = [row for row in document["rows"] if row["quantity"] == "step_seconds"]
    assert len(steps) == 10 and all(set(row) >= KEYS for row in document["rows"])
    for part in ("overall", *document["summary"]["by_source"]):
        found = document["summary"]["overall"] if part == "overall" else document["summary"]["by_source"][part]
        assert set(found) >= {"rows", "median_absolute_relative_error", "p90_absolute_relative_error", "bias"}
    assert set(document["summary"]) >= {"by_source", "by_device", "by_quality"} and "groups" in document


def test_the_text_has_tables(few: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--against", few]) == 0
    said = capsys.readouterr().out
    assert "megatron-sc21" in said and "by device" in said and "guess" in said
    # Each run with what was measured, what is predicted, and the error.
    (line,) = [line for line in said.splitlines() if line.startswith("sc21-t1-145b ")]
    assert len(line.split()) == 8 and "%" in line


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--against", "nowhere.jsonl"], "cannot read nowhere.jsonl"),
        (["--against", "."], "is no run directory"),
        (["model.num_layers=4", "--against", "runs.jsonl"], "takes no job"),
        (
            ["--against", "runs.jsonl", "--prefer", "money", "--cluster", "here"],
            "--cluster, --prefer have no effect beside",
        ),
        (["--against", "runs.jsonl", "--simulate", "9"], "--simulate has no effect beside --against"),
    ],
)
def test_what_cannot_be_predicted_is_refused(
    words: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *words]) == 2
    assert reason in capsys.readouterr().err


def test_a_file_of_something_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text("hello\n")
    assert main(["plan", "--against", str(path)]) == 2
    assert "holds no published runs" in capsys.readouterr().err

"""The `[run]` section refuses what contradicts itself."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.config import DEFAULT, Setting, build
from paceline.errors import JobError
from paceline.run.config import RunSection


def run(**values: Any) -> RunSection:
    settings = {f"run.{key}": Setting(value, DEFAULT) for key, value in values.items()}
    section = build({"run": RunSection}, settings)["run"]
    assert isinstance(section, RunSection)
    return section


def test_defaults() -> None:
    section = run()
    assert (section.seed, section.steps, section.dir, section.log_every, section.eval_every) == (0, None, "runs", 10, 0)


def test_counts_may_be_written_in_scientific_notation() -> None:
    assert run(tokens="15e12").tokens == 15 * 10**12


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"steps": 10, "tokens": 100}, "steps = 10 and tokens = 100 exclude each other"),
        ({"steps": 0}, "run.steps = 0 trains nothing"),
        ({"name": "a/b"}, "no folder name"),
        ({"log_every": 0}, ">= 1"),
        ({"seed": -1}, ">= 0"),
        ({"epochs": 0.0}, "> 0"),
    ],
)
def test_contradictions_are_refused(values: dict[str, Any], text: str) -> None:
    with pytest.raises(JobError, match=text):
        run(**values)

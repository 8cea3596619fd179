"""The planner's step times against published runs: what was reached, and no less. docs/plan-accuracy.md says it in full."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from benchmarks.plan_accuracy import CAUSES, DOCUMENT, render

from paceline.plan.against import STEP, against, summary

GOLDEN = Path(__file__).parents[1] / "golden" / "published_runs.jsonl"
ENOUGH = 20
"""Runs from which on a source's or a device's bias is held."""


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return against(GOLDEN)


@pytest.fixture(scope="module")
def good(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Predicted steps of runs of quality A and B."""
    return [
        row
        for row in document["rows"]
        if row["quantity"] == STEP and row["relative_error"] is not None and row["quality"] in "AB"
    ]


def test_every_line_keeps_its_place(document: Mapping[str, Any]) -> None:
    lines = GOLDEN.read_text(encoding="utf-8").splitlines()
    assert len({row["id"] for row in document["rows"]}) == len(lines)
    for row in (row for row in document["rows"] if row["quantity"] == STEP):
        assert (row["predicted"] is None) == bool(row["reason"])


def test_priors_alone_meet_the_accuracy_asked_for(good: list[dict[str, Any]]) -> None:
    found = summary(good)
    assert found["rows"] >= 600
    # Asked: 10% and 25%; reached: 5% and 14%.
    assert found["median_absolute_relative_error"] < 0.055 and found["p90_absolute_relative_error"] < 0.16
    assert found["skill"] > 0.5
    assert 0.75 <= found["inside_range"] <= 0.88


def test_no_source_and_no_device_is_biased(good: list[dict[str, Any]]) -> None:
    for key in ("source", "device"):
        for name in {row[key] for row in good}:
            found = summary([row for row in good if row[key] == name])
            if found["rows"] >= ENOUGH:
                assert abs(found["bias"]) <= 0.05, (name, found)


def test_fitted_constants_meet_the_accuracy_asked_for(good: list[dict[str, Any]]) -> None:
    fitted = summary(good)["calibrated"]
    # Asked: 5% and 12%.
    assert fitted["median_absolute_relative_error"] < 0.045 and fitted["p90_absolute_relative_error"] < 0.12


def test_context_parallel_runs_are_met(good: list[dict[str, Any]]) -> None:
    found = summary([row for row in good if "cp" in row["strategy"]])
    assert (
        found["rows"] > 30
        and found["median_absolute_relative_error"] < 0.05
        and found["p90_absolute_relative_error"] < 0.12
    )


def test_layouts_are_ranked(document: Mapping[str, Any]) -> None:
    groups = document["groups"]
    assert groups["median_rank_correlation"] >= 0.8
    assert groups["top1_regret_mean"] <= 0.05 and groups["top1_regret_max"] <= 0.20
    assert groups["top3_regret_mean"] <= 0.015


def test_experts_are_not_priced_as_dense(document: Mapping[str, Any]) -> None:
    lines = map(json.loads, GOLDEN.read_text(encoding="utf-8").splitlines())
    experts = {line["id"] for line in lines if line["model"].get("moe") is not None}
    rows = [row for row in document["rows"] if row["id"] in experts]
    assert len(experts) == 160 and {row["reason"] for row in rows} == {"experts are not modelled"}


def test_what_is_far_off_has_a_cause(document: Mapping[str, Any]) -> None:
    causes = tomllib.loads(CAUSES.read_text(encoding="utf-8"))["far_off"]
    assert set(document["summary"]["far_off"]) <= set(causes)


def test_the_page_says_what_the_program_prints(document: Mapping[str, Any]) -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == render(document), "python -m benchmarks.plan_accuracy --write"

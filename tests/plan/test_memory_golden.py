"""Predicted memory beside published runs: errors by source, verdicts, and what is known to be wrong."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from paceline.cluster.catalogue import device
from paceline.parallel.layout import Layout
from paceline.plan.device_memory import predict_memory
from paceline.plan.memory_rows import memory_records, memory_summary
from paceline.plan.rows import read_runs
from tests.plan.settings import gpt, setting

GOLDEN = Path(__file__).parent.parent / "golden"

CONTRADICT = {"bigscience-l634"}
"""65 GB at a micro-batch of 2 and 56 GB at 4 (l635), all else equal: one of them is a slip."""

KNOWN_WRONG = {"bigscience-l660", "deepspeed-azure-175b", "deepspeed-azure-1000b", "deepspeed-azure-2000b"}
"""l660 used 80 of 80 GB, as predicted. DeepSpeed's runs on Azure must have kept less of their activations than they say:
160 blocks x 8192 tokens x 32768 numbers x 2 bytes are 80 GiB of block inputs alone."""


@cache
def rows() -> list[dict[str, Any]]:
    """Memory rows of all published runs that are modelled."""
    return [
        {"id": run.id, "source": run.source, "predicted": None, "relative_error": None, **record}
        for run in read_runs(GOLDEN / "published_runs.jsonl")
        if run.setting is not None
        for record in memory_records(run.measured, run.setting)
    ]


def errors(source: str, quantity: str, key: str = "predicted_calibrated") -> list[float]:
    return [
        row[key] / row["measured"] - 1
        for row in rows()
        if row["source"] == source and row["quantity"] == quantity and row["id"] not in CONTRADICT
    ]


def p90(values: list[float]) -> float:
    return statistics.quantiles(map(abs, values), n=10, method="inclusive")[-1]


# BL-84: an estimate of memory with its error against measured runs, the three figures told apart.
def test_allocated_peaks_are_within_4_percent_for_9_of_10_rows() -> None:
    """48 rows of the zero-bubble paper: 4 models under 4 schedules. No constant was fitted to them."""
    found = errors("zerobubble2024", "memory_allocated_bytes")
    assert len(found) == 48
    assert p90(found) < 0.04
    assert abs(statistics.median(found)) < 0.02


def test_device_memory_is_within_10_percent_for_9_of_10_rows() -> None:
    found = errors("bigscience", "memory_device_bytes")
    assert len(found) >= 40
    assert p90(found) < 0.10
    assert abs(statistics.median(found)) < 0.03
    assert p90(errors("bigscience", "memory_device_bytes", "predicted")) < 0.12


def test_reserved_memory_of_both_tensor_parallel_runs() -> None:
    """They differ by what asynchronous tensor parallelism does not gather: 4.3 GiB."""
    found = {row["id"]: row for row in rows() if row["quantity"] == "memory_reserved_bytes"}
    assert all(abs(row["relative_error"]) < 0.05 for row in found.values()) and len(found) == 2
    measured, predicted = (
        found["torchtitan-70b-2d"][key] - found["torchtitan-70b-2d-asynctp"][key] for key in ("measured", "predicted")
    )
    assert predicted == pytest.approx(measured, rel=0.1)


def test_megatron_bridge_is_the_source_that_falls_short() -> None:
    """Five rows of one recipe in fp8, whose activations its source does not explain; see docs/guide/plan-memory.md."""
    found = errors("megatron-bridge", "memory_allocated_bytes")
    assert len(found) == 5 and max(map(abs, found)) < 0.15


def test_no_run_that_went_out_of_memory_is_said_to_fit_and_one_percent_of_verdicts_are_wrong() -> None:
    fits = memory_summary(rows())["fits"]
    assert fits["false_fits"] == 0
    assert set(fits["wrong"]) == KNOWN_WRONG
    said = fits["rows"] - fits["not_said"]
    assert fits["not_modelled"] == 0
    assert said > 500 and len(fits["wrong"]) <= 0.01 * said
    gone = [row for row in rows() if row["quantity"] == "fits" and row["measured"] == 0]
    assert len(gone) == 6 and sum(row["predicted"] == 0 for row in gone) >= 5


def test_ranges_hold_for_about_as_many_rows_as_they_say() -> None:
    weighed = [row for row in rows() if row["quantity"] != "fits"]
    inside = sum(row["p10"] <= row["measured"] <= row["p90"] for row in weighed) / len(weighed)
    assert 0.75 <= inside <= 0.95


def test_a_stage_with_the_embedding_and_one_without() -> None:
    facts = {fact["id"]: fact for fact in map(json.loads, (GOLDEN / "memory_extra.jsonl").read_text().splitlines())}
    spec = gpt(layers=64, width=11600, heads=80, vocab_size=50257)
    run = setting(
        spec, Layout(tp=4, pp=32, dp_shard=2), zero_stage=1, accumulation=256, recompute="full", precision="fp16",
        software="megatron-deepspeed", device=device("v100-sxm-32g"),
    )  # fmt: skip
    stages = predict_memory(run).stages
    assert stages[0].device_bytes == pytest.approx(_measured(facts["bigscience-104b-v100-first"]), rel=0.05)
    assert stages[1].device_bytes == pytest.approx(_measured(facts["bigscience-104b-v100-inner"]), rel=0.12)


def _measured(fact: Mapping[str, Any]) -> float:
    return float(fact["measured"])


def test_the_guide_shows_the_errors_that_the_program_prints() -> None:
    page = (GOLDEN.parent.parent / "docs/guide/plan-memory.md").read_text()
    summary = memory_summary(rows())
    for quantity in ("memory_allocated_bytes", "memory_reserved_bytes", "memory_device_bytes"):
        for source, found in summary[quantity]["by_source"].items():
            figures = found["calibrated"]
            median, p90_, bias = (
                figures[key] for key in ("median_absolute_relative_error", "p90_absolute_relative_error", "bias")
            )
            shown = f"| {quantity[7:-6]} | {figures['rows']} | {median:.1%} | {p90_:.1%} | {bias:+.1%} |"
            assert shown in page, f"{source}: {shown}"
    fits = summary["fits"]
    said = fits["rows"] - fits["not_said"]
    assert (
        f"Of {fits['rows']} modelled runs" in page and f"{said} get one here, and {len(fits['wrong'])} of those" in page
    )

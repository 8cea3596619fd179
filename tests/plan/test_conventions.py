"""TFLOP/s of published runs against their own tokens per second: a convention that is read wrongly shows here."""

from __future__ import annotations

import json
from collections import defaultdict
from statistics import median

import pytest

from paceline.plan.conventions import KNOWN, published_flop_per_token
from paceline.plan.rows import read_run
from tests.plan.test_accuracy import GOLDEN


def ratios() -> dict[str, list[float]]:
    """By convention, what a run's tokens/s make of its operations over the TFLOP/s that stand beside it."""
    found: dict[str, list[float]] = defaultdict(list)
    for line in GOLDEN.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        measured, convention = row["measured"], row["flops_convention"]
        run = read_run(line)
        if run.setting is None or not measured.get("tokens_per_s_per_gpu") or not measured.get("tflops_per_gpu"):
            continue
        setting = run.setting
        each = published_flop_per_token(convention, setting.spec, setting.sequence_length, setting.recompute)
        if each is not None:
            found[convention].append(each * measured["tokens_per_s_per_gpu"] / (measured["tflops_per_gpu"] * 1e12))
    return found


def test_tokens_and_operations_of_published_runs_agree() -> None:
    found = ratios()
    assert {"nemo_model_full", "nemo_model_causal", "mosaic_full"} <= set(found) <= set(KNOWN)
    for convention, values in found.items():
        # Printed to three digits; a wrong share of attention or of recomputation is off by 4% to 33%.
        assert median(values) == pytest.approx(1.0, abs=0.02), convention

"""The verdict and its words."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paceline.prove.certificate import TOLERANCE, Certificate, Finding
from paceline.rehearsal.compare import CurveDifference, SampleDifference
from paceline.rehearsal.tensors import StateDifference
from paceline.run.records import json_safe

EXACT = Finding(
    procs=3, layout="dp_replicate=3", precision="bf16", changes=(), tolerance=None,
    curves=CurveDifference(steps=10, first=None, largest=0.0, missing=()),
    samples=SampleDifference(steps=10, first=None, missing=()),
    state=StateDifference(tensors=87, equal=87, largest=0.0, worst=None, missing=(), counters_equal=True, random_equal=True),
)  # fmt: skip
CLOSE = msgspec.structs.replace(
    EXACT, procs=1, layout="one rank", precision="fp64", changes=("parallel.precision=fp64",), tolerance=TOLERANCE,
    curves=msgspec.structs.replace(EXACT.curves, first=6, largest=2e-16),
    state=msgspec.structs.replace(EXACT.state, equal=3, largest=3e-14, worst="optimizer/exp_avg/a", random_equal=None),
)  # fmt: skip


def certificate(same: Finding = EXACT, elsewhere: Finding = CLOSE) -> Certificate:
    return Certificate(
        job="examples/tiny.toml", folder=Path("runs/tiny-prove"), procs=3, other=1, steps=(5, 5), same=same,
        elsewhere=elsewhere, killed=(7, 7), seconds=61.0, versions={"paceline": "0.1.0"}, device="a processor",
    )  # fmt: skip


def changed(finding: Finding, part: str, **fields: Any) -> Finding:
    return msgspec.structs.replace(finding, **{part: msgspec.structs.replace(getattr(finding, part), **fields)})


def test_a_proof_that_holds() -> None:
    document, text = certificate().document(), certificate().describe()
    assert document["verdict"] == "pass" and document["bitwise"] is True and document["samples_equal"] is True
    assert document["procs"] == 3 and document["other"] == 1 and document["steps"] == [5, 5]
    assert document["largest_difference"] == 3e-14 and document["exit"] == 0
    assert "FAIL" not in text and "verdict: pass" in text and "87 of 87 tensors" in text and "7 processes" in text
    assert "with parallel.precision=fp64" in text and "3.0e-14 (optimizer/exp_avg/a)" in text


@pytest.mark.parametrize(
    ("part", "fields", "told"),
    [
        ("curves", {"first": 6, "largest": 1e-16}, "from step 6"),
        ("curves", {"missing": (10,)}, "steps 10 are missing"),
        ("samples", {"first": 6}, "others from step 6"),
        ("samples", {"missing": (1, 2, 3, 4, 5, 6)}, "1, 2, 3, 4 and 2 more"),
        ("state", {"equal": 86, "largest": 1e-9, "worst": "model/b"}, "1 of 87 tensors differ, by 1.0e-09 at most (model/b)"),
        ("state", {"random_equal": False}, "random states differ"),
        ("state", {"counters_equal": False}, "counters differ"),
        ("state", {"missing": ("model/c",)}, "on one side only: model/c"),
    ],
)  # fmt: skip
def test_on_the_same_ranks_every_bit_counts(part: str, fields: dict[str, Any], told: str) -> None:
    lost = certificate(same=changed(EXACT, part, **fields))
    assert not lost.holds and lost.document()["verdict"] == "fail" and lost.document()["exit"] == 1
    assert lost.document()["bitwise"] is False
    text = lost.describe()
    assert told in text and text.count("FAIL") == 1 and "verdict: fail" in text


@pytest.mark.parametrize(
    ("part", "fields"),
    [
        ("curves", {"largest": 2e-9}),
        ("state", {"largest": 2e-9}),
        ("state", {"largest": math.inf}),
        ("state", {"counters_equal": False}),
        ("samples", {"first": 6}),
    ],
)
def test_on_other_ranks_the_tolerance_counts(part: str, fields: dict[str, Any]) -> None:
    lost = certificate(elsewhere=changed(CLOSE, part, **fields))
    assert not lost.holds and lost.document()["bitwise"] is True and lost.document()["verdict"] == "fail"
    assert lost.describe().count("FAIL") == 1
    assert json_safe(lost.document())["largest_difference"] != 0.0


def test_a_state_without_tensors_proves_nothing() -> None:
    assert not changed(EXACT, "state", tensors=0, equal=0).holds

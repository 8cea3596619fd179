"""Did the resume work? The first step after it beside what the run that saved had at the same step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from paceline.checkpoint.manifest import Manifest
from paceline.run.records import Certificate
from paceline.train.step import StepResult

TOLERANCE = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 3e-2, "fp16": 3e-2}
"""Relative difference of loss and norm that another order of sums may make, by precision; a lost moment or a wrong batch
makes more. Norms in 16 bit vary by about 1%."""


def certify(manifest: Manifest, layout: Mapping[str, Any], result: StepResult, precision: str) -> Certificate:
    """The verdict on step `manifest.step + 1`.

    Args:
        manifest: of the checkpoint that was resumed.
        layout: the present one, as the manifest states layouts.
        result: what the step gave.
        precision: of the run.
    """
    expected = manifest.next_step
    tolerance = TOLERANCE[precision]
    pairs = [] if expected is None else [(expected.loss, result.loss), (expected.grad_norm, result.grad_norm)]
    return Certificate(
        step=manifest.step + 1, resumed_step=manifest.step, same_layout=dict(layout) == dict(manifest.layout),
        expected_loss=expected.loss if expected else None, loss=result.loss,
        expected_grad_norm=expected.grad_norm if expected else None, grad_norm=result.grad_norm,
        tolerance=tolerance, verdict=_verdict(pairs, tolerance),
    )  # fmt: skip


def describe(certificate: Certificate) -> str:
    """The verdict as a sentence."""
    c = certificate
    if c.verdict == "unknown":
        return f"resume: step {c.step} cannot be compared, as the checkpoint was the last of its run"
    beside = f"loss {c.loss!r} and norm {c.grad_norm!r}, expected {c.expected_loss!r} and {c.expected_grad_norm!r}"
    where = "the same layout" if c.same_layout else "another layout"
    if c.verdict == "exact":
        return f"resume: step {c.step} is bit for bit what it was before, on {where} ({beside})"
    if c.verdict == "close":
        surprise = "; on the same layout it should be exact" if c.same_layout else ""
        return f"resume: step {c.step} is what it was before to {c.tolerance:g}, on {where} ({beside}){surprise}"
    return f"warning: resume: step {c.step} is NOT what it was before, on {where}: {beside}"


def _verdict(
    pairs: list[tuple[float | None, float]], tolerance: float
) -> Literal["exact", "close", "different", "unknown"]:
    if not pairs:
        return "unknown"
    if all(_same(expected, found) for expected, found in pairs):
        return "exact"
    return "close" if all(_near(expected, found, tolerance) for expected, found in pairs) else "different"


def _same(expected: float | None, found: float) -> bool:
    """Not finite numbers are stored as None."""
    return expected == found if expected is not None else not math.isfinite(found)


def _near(expected: float | None, found: float, tolerance: float) -> bool:
    if expected is None or not math.isfinite(found):
        return _same(expected, found)
    return abs(found - expected) <= tolerance * max(abs(expected), abs(found))

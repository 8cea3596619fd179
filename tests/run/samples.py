"""Records for tests, with figures that are easy to add up."""

from __future__ import annotations

from typing import Any

from paceline.run.records import PARTS, RunStarted, Step

UNSTAGED = tuple(part for part in PARTS if part != "bubble")
"""The parts of a step without a pipeline."""


def started(at: int = 0, **fields: Any) -> RunStarted:
    """An attempt on 2 ranks that begins after step `at`."""
    values: dict[str, Any] = {
        "step": at, "run_id": "0123abcd", "job_digest": "d" * 64, "world_size": 2,
        "layout": {"dp_replicate": 2, "dp_shard": 1, "cp": 1, "tp": 1, "pp": 1}, "device": "cpu", "precision": "bf16",
        "compile": False, "microbatch": 12, "accumulation": 1, "global_batch": 24, "sequence_length": 128,
        "parameters": 900_000, "flop_per_token": 6e6, "flop_convention": "6 per parameter and attention",
        "peak_flop_per_second": 1e11, "host": "box", "samples": at * 24,
    }  # fmt: skip
    return RunStarted(**{**values, **fields})


def step(number: int, **fields: Any) -> Step:
    """A step of 0.1 s whose parts add up."""
    seconds = (0.005, 0.03, 0.04, 0.01, 0.01, 0.001, 0.004)
    values: dict[str, Any] = {
        "step": number, "loss": 5.0 - 0.01 * number, "grad_norm": 1.0, "lr": 3e-3, "tokens": 3072, "seconds": 0.1,
        "tokens_per_second": 30720.0, "mfu": 0.4, "samples": number * 24,
        "parts": dict(zip(UNSTAGED, seconds, strict=True)),
    }  # fmt: skip
    return Step(**{**values, **fields})

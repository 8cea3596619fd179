"""`plan --fixed`: the given layout, its state bytes and every reason why it cannot run. No search, no torch."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from paceline.job.resolve import Resolved
from paceline.parallel.memory import layout_cost, parameter_sizes
from paceline.units import format_bytes


def fixed_plan(resolved: Resolved, cluster: str) -> dict[str, Any]:
    """The document of `plan --fixed --json`, less its schema."""
    reason = None if resolved.fits else misfit(resolved)
    chosen = {
        "layout": {**resolved.layout.to_record(), "microbatch": resolved.batch.microbatch,
                   "accumulation": resolved.batch.accumulation},
        "fits": resolved.fits,
        "memory": {"stages": [resolved.memory.to_record()], "heaviest": 0},
        "memory_available_bytes": resolved.memory_available_bytes,
        "collectives": [asdict(c) for c in _collectives(resolved)],
        "step_seconds": None,
        "tokens_per_second_per_device": None,
        "mfu": None,
        "mfu_convention": None,
        "run_seconds": None,
        "cost": None,
    }  # fmt: skip
    return {
        "cluster": cluster,
        "chosen": chosen,
        "alternatives": [],
        "rejected": [] if reason is None else [{"layout": chosen["layout"], "reason": reason}],
        "advice": [],
        "assumptions": [
            "memory is that of the eager decoder at the peak of a step; compiled blocks keep less",
            f"a {resolved.host.device_kind} process holds {format_bytes(resolved.memory.context_bytes)} before the model",
            "step time, money and search are not modelled in this version: their fields are null",
        ],
        "derivations": [asdict(d) for d in resolved.derivations],
    }


def misfit(resolved: Resolved) -> str:
    """Why the layout does not fit, with the parts and the cheapest change."""
    memory = resolved.memory
    parts = {
        key.removesuffix("_bytes"): size
        for key, size in memory.to_record().items()
        if size and key not in ("total_bytes", "context_bytes")
    }
    shown = ", ".join(f"{name} {format_bytes(size)}" for name, size in sorted(parts.items(), key=lambda i: -i[1]))
    return (
        f"{format_bytes(memory.total_bytes)} per rank are needed and {format_bytes(resolved.memory_available_bytes)} are "
        f"there: {shown}. {cheapest_change(resolved)}"
    )


def cheapest_change(resolved: Resolved) -> str:
    """The change that frees most at the least cost in speed."""
    memory = resolved.memory
    state = memory.parameters_bytes + memory.gradients_bytes + memory.moments_bytes
    if memory.activations_bytes + memory.logits_bytes > state and resolved.batch.microbatch > 1:
        half = max(d for d in range(1, resolved.batch.microbatch) if resolved.batch.microbatch % d == 0)
        return f"Cheapest change: batch.microbatch={half} (now {resolved.batch.microbatch}); the result stays the same."
    return (
        f"Cheapest change: {format_bytes(state)} of it is state that every replica keeps whole; "
        "a smaller model, or a layout that shards it."
    )


def _collectives(resolved: Resolved):  # type: ignore[no-untyped-def]
    sizes = parameter_sizes(resolved.spec, 8 if resolved.precision == "fp64" else 4)
    return layout_cost(sizes, resolved.layout, resolved.job.optimizer, resolved.ddp).collectives

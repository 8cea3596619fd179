"""Why a layout needs the memory it needs, and the change that frees most at the least cost in speed."""

from __future__ import annotations

from typing import Any

import msgspec

from paceline.job.resolve import Resolved
from paceline.parallel.memory import rank_memory
from paceline.parallel.recompute.cost import extra_flop_share
from paceline.parallel.transforms import Transforms
from paceline.units import format_bytes, format_percent


def memory_advice(resolved: Resolved) -> tuple[str, str]:
    """The parts, largest first, and the cheapest change."""
    parts = {
        key.removesuffix("_bytes"): size
        for key, size in resolved.memory.to_record().items()
        if size and key not in ("total_bytes", "context_bytes")
    }
    shown = ", ".join(f"{name} {format_bytes(size)}" for name, size in sorted(parts.items(), key=lambda i: -i[1]))
    return shown, _cheapest_change(resolved)


def _cheapest_change(resolved: Resolved) -> str:
    memory, microbatch = resolved.memory, resolved.batch.microbatch
    state = memory.parameters_bytes + memory.master_bytes + memory.gradients_bytes + memory.moments_bytes
    if memory.activations_bytes + memory.logits_bytes > state and microbatch > 1:
        smaller = max(d for d in range(1, microbatch) if microbatch % d == 0)
        freed = (memory.activations_bytes + memory.logits_bytes) * (microbatch - smaller) // microbatch
        return (
            f"Cheapest change: batch.microbatch={smaller} (now {microbatch}) frees {format_bytes(freed)}; "
            "the result stays the same."
        )
    wanted = max(memory.total_bytes - resolved.memory_available_bytes, state // 10)
    if resolved.transforms.recompute == "none" and (freed := _freed(resolved, recompute="full")) >= wanted:
        share = extra_flop_share(resolved.spec, resolved.job.data.sequence_length, "full")
        return (
            f"Cheapest change: parallel.recompute=full frees {format_bytes(freed)} for {format_percent(share)} more "
            "arithmetic; the result stays the same."
        )
    layout = resolved.layout
    if layout.dp_shard == 1 and layout.dp_replicate > 1:
        return (
            f"Cheapest change: {format_bytes(state)} of it are weights, gradients and moments, which every replica keeps "
            f"whole; parallel.dp_shard={layout.dp_replicate} splits them over the ranks; the result stays the same."
        )
    if resolved.job.optimizer.name == "adamw" and resolved.transforms.offload.place == "none":
        place = "disk" if resolved.host.device_kind == "cpu" else "host"
        return (
            f"Cheapest change: parallel.offload={place} moves {format_bytes(memory.moments_bytes)} of moments out; "
            "the result stays the same."
        )
    return f"{format_bytes(state)} of it is state: take a smaller model, more ranks, or a device with more memory."


def _freed(resolved: Resolved, **changes: Any) -> int:
    """Bytes per rank that other transforms would free."""
    transforms: Transforms = msgspec.structs.replace(resolved.transforms, **changes)
    memory = rank_memory(
        resolved.spec, resolved.layout, resolved.batch, resolved.job.optimizer, resolved.ddp, resolved.fsdp,
        sequence_length=resolved.job.data.sequence_length, precision=resolved.precision,
        device_kind=resolved.host.device_kind, transforms=transforms,
        tensor=resolved.tensor, context=resolved.context, pipeline=resolved.pipeline, pp_rank=resolved.heaviest,
    )  # fmt: skip
    return resolved.memory.total_bytes - memory.total_bytes

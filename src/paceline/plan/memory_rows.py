"""What a published run says of its memory, in bytes by quantity, and what is predicted for it. Imports no torch.

"Memory" in a report is one of three figures, by what its author read it from; the units differ as well:

    bigscience       nvidia-smi, in thousands of MiB             (chronicles-prequel.md, end of the sweep tables)
    torchtitan       max_reserved_gib of its log line, GiB       (components/metrics.py)
    zerobubble2024   the framework's allocator, GB               (table 4: within 4% of the allocated peak in GB, not GiB)
    megatron-bridge  peak allocated, GB                          (skills, perf-memory-tuning and perf-activation-recompute)

What names its kind or unit in the key (`memory_reserved_gib`) is taken at its word.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from paceline.model.flop import Recompute
from paceline.plan.device_memory import predict_memory
from paceline.plan.memory_habits import habits_of
from paceline.plan.setting import DeviceMemory, Setting
from paceline.plan.verdict import fits, usable_bytes
from paceline.units import GiB, MiB

Quantity = Literal["memory_allocated_bytes", "memory_reserved_bytes", "memory_device_bytes", "fits"]
QUANTITIES: tuple[Quantity, ...] = get_args(Quantity)
GB = 10**9


class Meaning(NamedTuple):
    """What the memory that a source prints is, and its "GB" in bytes."""

    quantity: Quantity
    unit: int


MEANINGS = {
    "bigscience": Meaning("memory_device_bytes", 1000 * MiB),
    "torchtitan": Meaning("memory_reserved_bytes", GiB),
    "zerobubble2024": Meaning("memory_allocated_bytes", GB),
    "megatron-bridge": Meaning("memory_allocated_bytes", GB),
}
UNKNOWN = Meaning("memory_allocated_bytes", GB)

RAN = (
    "step_time_s",
    "tokens_per_s_per_gpu",
    "tokens_per_s",
    "samples_per_s",
    "samples_per_s_per_gpu",
    "tflops_per_gpu",
)
"""Fields that only a run that fitted has."""

ZERO_STAGES: tuple[Literal[0, 1, 2, 3], ...] = (0, 1, 3)
"""What sharding may be where it is not published."""

BF16_OPTIMIZER_LINE = 895
"""Where BigScience's chronicles of 2022 say that, from here on, gradients are summed in fp32 ("Rebalancing layers")."""


def measured_memory(measured: Mapping[str, Any], source: str) -> dict[str, float]:
    """Bytes by quantity, and `fits`: 1.0 for a run that ran, 0.0 for one out of memory, by fragmentation too."""
    meaning = MEANINGS.get(source, UNKNOWN)
    found: dict[str, float] = {}
    for key, value in measured.items():
        if not key.startswith("memory") or isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            continue
        unit = meaning.unit if "as_published" in key else GiB if key.endswith("gib") else GB
        named = next((kind for kind in ("allocated", "reserved", "device") if kind in key), None)
        found[f"memory_{named}_bytes" if named else meaning.quantity] = float(value) * unit
    ran = any(measured.get(field) for field in RAN)
    if measured.get("oom") or measured.get("oom_fragmentation"):
        found["fits"] = 0.0
    elif found or ran:
        found["fits"] = 1.0
    return found


def habits_key(row: Mapping[str, Any]) -> str:
    """Key of what a run's software keeps, where it changed within a generation; "" where the generation says it."""
    if row.get("source") == "zerobubble2024":
        return "zero-bubble"
    if row.get("source") != "bigscience":
        return ""
    line = re.search(r"prequel\.md lines? (\d+)", str(row.get("where") or ""))
    early = line is not None and int(line[1]) < BF16_OPTIMIZER_LINE
    return "megatron-deepspeed" if early else "megatron-deepspeed-bf16"


class PredictedMemory(NamedTuple):
    """Of one run: the record, bytes by quantity with `fits` (None: not to be told), and why it is not."""

    memory: DeviceMemory
    quantities: dict[str, float | None]
    reason: str | None


def predicted_memory(setting: Setting, calibrated: bool = True) -> PredictedMemory:
    """What is predicted of a published run. Whether it fits is not said where it hangs on what was not published.

    Args:
        calibrated: see `predict_memory`.

    Raises:
        ValueError: the setting contradicts itself.
    """
    memory = predict_memory(setting, calibrated)
    verdict, reason = _verdict(setting, memory)
    quantities: dict[str, float | None] = {
        "memory_allocated_bytes": memory.allocated_bytes,
        "memory_reserved_bytes": memory.reserved_bytes,
        "memory_device_bytes": memory.device_bytes,
        "fits": None if verdict is None else float(verdict),
    }
    return PredictedMemory(memory, quantities, reason)


def memory_records(measured: Mapping[str, float], setting: Setting) -> list[dict[str, Any]]:
    """Rows of `plan --against`: each memory figure of a run, and whether it fitted, beside what is predicted."""
    quantities = [quantity for quantity in QUANTITIES if quantity in measured]
    if not quantities:
        return []
    try:
        prior, fitted = predicted_memory(setting, calibrated=False), predicted_memory(setting)
    except ValueError as error:
        return [{"quantity": q, "measured": measured[q], "reason": str(error)} for q in quantities]
    return [_record(quantity, measured[quantity], prior, fitted) for quantity in quantities]


def _record(quantity: Quantity, measured: float, prior: PredictedMemory, fitted: PredictedMemory) -> dict[str, Any]:
    predicted, calibrated = prior.quantities[quantity], fitted.quantities[quantity]
    record = {
        "quantity": quantity, "measured": measured, "predicted": predicted, "predicted_calibrated": calibrated,
        "oom_probability": fitted.memory.oom_probability,
    }  # fmt: skip
    if quantity == "fits":
        return {**record, "reason": fitted.reason if predicted is None or calibrated is None else None}
    # What tensors take does not hang on the allocator.
    low, high = (fitted if quantity == "memory_allocated_bytes" else prior).memory.spread
    within = {"p10": (predicted or 0.0) * low, "p90": (predicted or 0.0) * high}
    return {**record, **within, "relative_error": (predicted or 0.0) / measured - 1, "parts": fitted.memory.parts}


def memory_summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Errors of the priors and of the calibrated figures by quantity and source; and how the verdicts came out."""
    found: dict[str, Any] = {}
    for quantity in QUANTITIES[:-1]:
        of = [row for row in rows if row["quantity"] == quantity and row["predicted"] is not None]
        sources = sorted({row["source"] for row in of})
        found[quantity] = {
            "overall": _errors(of), "by_source": {s: _errors([r for r in of if r["source"] == s]) for s in sources}
        }  # fmt: skip
    told = [row for row in rows if row["quantity"] == "fits" and row["measured"] is not None]
    modelled = [row for row in told if "oom_probability" in row]
    given = [row for row in modelled if row["predicted"] is not None]
    found["fits"] = {
        "rows": len(told),
        "not_modelled": len(told) - len(modelled),
        "not_said": len(modelled) - len(given),
        "wrong": sorted(row["id"] for row in given if row["predicted"] != row["measured"]),
        "false_fits": sum(row["predicted"] > row["measured"] for row in given),
        "false_oom": sum(row["predicted"] < row["measured"] for row in given),
    }
    return found


def _errors(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of the priors, and the same of the calibrated figures; `inside_range` is the share between P10 and P90."""
    prior = [row["predicted"] / row["measured"] - 1 for row in rows]
    fitted = [row["predicted_calibrated"] / row["measured"] - 1 for row in rows]
    inside = [row["p10"] <= row["measured"] <= row["p90"] for row in rows]
    return {
        **_figures(prior), "inside_range": sum(inside) / len(inside) if inside else None, "calibrated": _figures(fitted)
    }  # fmt: skip


def _figures(errors: Sequence[float]) -> dict[str, Any]:
    absolute = sorted(abs(error) for error in errors)
    return {
        "rows": len(absolute),
        "median_absolute_relative_error": statistics.median(absolute) if absolute else None,
        "p90_absolute_relative_error": _ninetieth(absolute) if absolute else None,
        "bias": statistics.median(errors) if errors else None,
    }


def _ninetieth(ordered: Sequence[float]) -> float:
    return statistics.quantiles(ordered, n=10, method="inclusive")[-1] if len(ordered) > 1 else ordered[0]


def _verdict(setting: Setting, memory: DeviceMemory) -> tuple[bool | None, str | None]:
    """Whether it fits. "No" is said only where it holds under all that recomputation and sharding might be where they are
    not published, and "yes" only where it holds without expandable segments as well."""
    if fits(memory):
        if _fragmented(setting, memory):
            return None, "whether it fits hangs on the allocator: with expandable segments it does"
        return True, None
    unsaid = [note for note in setting.assumed if "not published" in note]
    recomputed = any("recomput" in note for note in unsaid)
    sharded = any(note.startswith("sharding stage") for note in unsaid)
    choices: tuple[Recompute, ...] = ("none", "full") if recomputed else (setting.recompute,)
    stages = ZERO_STAGES if sharded else (setting.zero_stage,)
    if not any(fits(predict_memory(_like(setting, choice, stage))) for choice in choices for stage in stages):
        return False, None
    what = " and ".join(name for name, open_ in (("recomputation", recomputed), ("sharding", sharded)) if open_)
    return None, f"whether it fits hangs on {what}, which is not published"


def _fragmented(setting: Setting, memory: DeviceMemory) -> bool:
    """Whether what an interleaved pipeline's allocator may waste would not fit."""
    habits = habits_of(setting.memory_habits or setting.software, setting.precision)
    waste = habits.fragments if setting.layout.pp > 1 and setting.stages_per_rank > 1 else 0.0
    if not waste:
        return False
    return memory.allocated_bytes * (1 + waste) + habits.context_bytes > usable_bytes(setting)


def _like(setting: Setting, recompute: Recompute, stage: Literal[0, 1, 2, 3]) -> Setting:
    layout = setting.layout
    if stage:
        layout = msgspec.structs.replace(layout, dp_replicate=1, dp_shard=layout.dp)
    return msgspec.structs.replace(setting, recompute=recompute, zero_stage=stage, layout=layout)

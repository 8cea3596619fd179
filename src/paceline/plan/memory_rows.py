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
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from paceline.model.flop import Recompute
from paceline.plan.device_memory import predict_memory
from paceline.plan.setting import DeviceMemory, Setting
from paceline.plan.verdict import fits
from paceline.units import GiB, MiB

Quantity = Literal["memory_allocated_bytes", "memory_reserved_bytes", "memory_device_bytes", "fits"]
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
    return "megatron-deepspeed-2022" if early else "megatron-deepspeed-2022-bf16"


class PredictedMemory(NamedTuple):
    """Of one run: the record, bytes by quantity with `fits` (None: not to be told), and why it is not."""

    memory: DeviceMemory
    quantities: dict[str, float | None]
    reason: str | None


def predicted_memory(setting: Setting) -> PredictedMemory:
    """What is predicted of a published run. Whether it fits is not said where it hangs on what was not published.

    Raises:
        ValueError: the setting contradicts itself.
    """
    memory = predict_memory(setting)
    verdict, reason = _verdict(setting, memory)
    quantities: dict[str, float | None] = {
        "memory_allocated_bytes": memory.allocated_bytes,
        "memory_reserved_bytes": memory.reserved_bytes,
        "memory_device_bytes": memory.device_bytes,
        "fits": None if verdict is None else float(verdict),
    }
    return PredictedMemory(memory, quantities, reason)


def _verdict(setting: Setting, memory: DeviceMemory) -> tuple[bool | None, str | None]:
    """Whether it fits; under all that it might be where recomputation or sharding is not published."""
    unsaid = [note for note in setting.assumed if "not published" in note]
    recomputed = any("recomput" in note for note in unsaid)
    sharded = any(note.startswith("sharding stage") for note in unsaid)
    if not (recomputed or sharded):
        return fits(memory), None
    choices: tuple[Recompute, ...] = ("none", "full") if recomputed else (setting.recompute,)
    stages = ZERO_STAGES if sharded else (setting.zero_stage,)
    verdicts = {fits(predict_memory(_like(setting, choice, stage))) for choice in choices for stage in stages}
    if len(verdicts) == 1:
        return verdicts.pop(), None
    what = " and ".join(name for name, open_ in (("recomputation", recomputed), ("sharding", sharded)) if open_)
    return None, f"whether it fits hangs on {what}, which is not published"


def _like(setting: Setting, recompute: Recompute, stage: Literal[0, 1, 2, 3]) -> Setting:
    layout = setting.layout
    if stage:
        layout = msgspec.structs.replace(layout, dp_replicate=1, dp_shard=layout.dp)
    return msgspec.structs.replace(setting, recompute=recompute, zero_stage=stage, layout=layout)

"""Published runs: a line of RUNS.jsonl becomes a setting and what was measured of it, or a reason why it does not.

What a line leaves out is assumed from the habits of its software generation (`plan.software`), never from the run; each
assumption is kept in words. A line that says too little, or describes what is not modelled, keeps its place with a
reason. The format is described in docs/guide/plan-against.md. Imports no torch.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec

from paceline.errors import UsageError
from paceline.plan.conventions import published_flop_per_token
from paceline.plan.memory_rows import measured_memory
from paceline.plan.row_fields import NotModelled, Table, part, positive
from paceline.plan.row_machine import device_key
from paceline.plan.row_setting import setting_of_run
from paceline.plan.setting import Setting


class PublishedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One line. `setting` is None where it is not modelled, and `reason` says why.

    measured: by quantity: seconds, bytes, and 1 or 0 for `fits`. group: the same for runs that differ only in layout.
    """

    id: str
    source: str
    device: str
    quality: str
    setting: Setting | None
    measured: dict[str, float]
    reason: str | None = None
    strategy: str = ""
    group: str = ""


def read_runs(path: Path) -> list[PublishedRun]:
    """All lines of a file, in their order.

    Raises:
        UsageError: it cannot be read, or holds no line of that format.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}", key="--against", values={"path": str(path)}) from None
    runs = [read_run(line, number) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not runs or not any(run.source for run in runs):
        raise UsageError(
            f"{path} holds no published runs: one JSON object a line with id, source, hardware, model, parallelism, measured",
            key="--against",
            values={"path": str(path), "lines": len(runs)},
            hint="The format is described in docs/guide/plan-against.md.",
        )
    return runs


def read_run(line: str, number: int = 0) -> PublishedRun:
    """One line, whatever is wrong with it."""
    try:
        row = json.loads(line)
    except ValueError as error:
        return _unread(f"line {number}", f"is no JSON: {error}")
    if not isinstance(row, dict):
        return _unread(f"line {number}", "is no JSON object")
    try:
        return _run(row)
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError, OverflowError) as error:
        return _unread(str(row.get("id", f"line {number}")), f"has a field of another form: {error!r}", row)


def _unread(name: str, reason: str, row: Table | None = None) -> PublishedRun:
    source, quality = (str((row or {}).get(key) or "") for key in ("source", "quality"))
    return PublishedRun(id=name, source=source, device="", quality=quality, setting=None, measured={}, reason=reason)


def _run(row: Table) -> PublishedRun:
    hardware = part(row, "hardware")
    key = device_key(str(hardware.get("gpu") or ""))
    setting, reason = None, None
    try:
        setting = setting_of_run(row)
    except NotModelled as refused:
        reason = str(refused)
    except UsageError as error:
        reason = error.message
    return PublishedRun(
        id=str(row.get("id")),
        source=str(row.get("source") or ""),
        device=key or str(hardware.get("gpu") or "unnamed"),
        quality=str(row.get("quality") or ""),
        setting=setting,
        measured=_measured(row, setting),
        reason=reason,
        strategy=strategy_of(setting) if setting else "",
        group=_group(row),
    )


def _measured(row: Table, setting: Setting | None) -> dict[str, float]:
    measured = part(row, "measured")
    memory = measured_memory(measured, str(row.get("source") or ""))
    found = {quantity: value for quantity, value in memory.items() if math.isfinite(value)}
    seconds = step_seconds(row, setting)
    return {"step_seconds": seconds, **found} if seconds else found


def step_seconds(row: Table, setting: Setting | None) -> float | None:
    """Seconds of a step: as published, else from samples or tokens per second, else from TFLOP/s by their convention."""
    measured = part(row, "measured")
    gpus, batch = positive(part(row, "hardware"), "gpus"), positive(row, "global_batch")
    if batch is None:
        return None
    published = positive(measured, "step_time_s")
    length = positive(part(row, "model"), "seq_len")
    if published or not gpus or not length:
        return published
    tokens = batch * length
    for key, whole in (
        ("tokens_per_s_per_gpu", tokens / gpus),
        ("tokens_per_s", tokens),
        ("samples_per_s", batch),
        ("samples_per_s_per_gpu", batch / gpus),
    ):
        rate = positive(measured, key)
        if rate:
            return whole / rate
    rate, convention = positive(measured, "tflops_per_gpu"), str(row.get("flops_convention") or "")
    if not rate or setting is None:
        return None
    per_token = published_flop_per_token(convention, setting.spec, int(length), setting.recompute)
    return per_token * tokens / gpus / (rate * 1e12) if per_token else None


def _group(row: Table) -> str:
    """What makes runs comparable: all but the layout, the micro-batch and recomputation."""
    model, hardware = part(row, "model"), part(row, "hardware")
    same = [row.get(key) for key in ("source", "release", "task", "precision", "global_batch")]
    same += [hardware.get(key) for key in ("gpu", "gpus", "gpus_per_node")]
    same += [model.get(key) for key in ("name", "layers", "hidden", "heads", "ffn", "seq_len")]
    return "|".join(map(str, same))


def strategy_of(setting: Setting) -> str:
    """The strategies that a setting combines, with a plus between."""
    layout = setting.layout
    data = {0: "dp", 1: "zero1", 2: "zero2", 3: "fsdp"}[setting.zero_stage]
    names = [data] if layout.dp > 1 else []
    names += [axis for axis in ("cp", "tp", "pp") if getattr(layout, axis) > 1]
    return "+".join(names) or "one device"

"""The resolved job as TOML: every value a number, its origin behind it, what does not apply as a comment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import tomlkit
from tomlkit.items import InlineTable, Table

from paceline.job.checks import without_effect
from paceline.job.load import SECTIONS, Job
from paceline.job.resolve import Resolved, procs_here
from paceline.units import Seconds

_LENGTHS = ("run.tokens", "run.epochs")


def resolved_values(resolved: Resolved) -> dict[str, Any]:
    """Every `section.key` with its final value; None where a key does not apply."""
    values: dict[str, Any] = {}
    for key, value in resolved.job.values():
        values[key] = _plain(value)
    layout = resolved.layout
    values |= {f"parallel.{axis}": degree for axis, degree in layout.degrees().items()}
    values |= {
        "run.name": resolved.job.name,
        "run.steps": resolved.steps,
        **dict.fromkeys(_LENGTHS),
        "batch.microbatch": resolved.batch.microbatch,
        "parallel.precision": resolved.precision,
        "parallel.compile": resolved.compile,
        "parallel.loss_chunk_tokens": resolved.transforms.loss_chunk_tokens,
        "parallel.offload_dir": str(folder) if (folder := resolved.transforms.offload.folder) else None,
        # Of several hosts, what each of them starts; else all.
        "launch.procs_per_node": procs_here(resolved.job, resolved.host)
        if resolved.job.launch.nodes
        else layout.world_size,
    }
    values |= {
        f"model.{key}": value
        for key, value in _plain(msgspec.to_builtins(resolved.spec)).items()
        if f"model.{key}" in values
    }
    return values | _reduction_values(resolved) | dict.fromkeys(without_effect(resolved.job.values()))


def _reduction_values(resolved: Resolved) -> dict[str, Any]:
    """How gradients are reduced; None for what does not apply to the layout."""
    layout, ddp, fsdp = resolved.layout, resolved.ddp, resolved.fsdp
    replicated, sharded = layout.replicas > 1 and layout.dp_shard == 1, layout.dp_shard > 1
    summed = layout.dp * layout.cp > 1
    # Gradients of fp64 arithmetic travel as they are; there is no setting to name it.
    own = None if resolved.precision == "fp64" else "fp32"
    return {
        "parallel.sequence_parallel": resolved.tensor.sequence_parallel if layout.tp > 1 else None,
        "parallel.cp_method": resolved.context.method if layout.cp > 1 else None,
        "parallel.pp_schedule": resolved.pipeline.schedule if layout.pp > 1 else None,
        "parallel.pp_stages_per_rank": resolved.pipeline.stages_per_rank if layout.pp > 1 else None,
        "parallel.pp_layers": list(resolved.pipeline.layers) if layout.pp > 1 else None,
        "parallel.bucket_bytes": ddp.bucket_bytes if replicated else None,
        "parallel.overlap": ddp.overlap if replicated else None,
        "parallel.reduce_dtype": ("bf16" if ddp.reduce_bf16 else own) if summed else None,
        "parallel.zero_stage": fsdp.zero_stage if sharded else None,
        "parallel.reduce_every": ("microbatch" if sharded and fsdp.reduce_every_microbatch else "step")
        if summed
        else None,
    }


def resolved_toml(resolved: Resolved) -> str:
    """The text of the run directory's `job.toml`."""
    document = tomlkit.document()
    document.add(tomlkit.comment("Resolved by paceline. Behind each value: where it came from."))
    values = resolved_values(resolved)
    for section in SECTIONS:
        table = tomlkit.table()
        for key in (k for k in values if k.startswith(f"{section}.")):
            _add(table, key.split(".")[1], values[key], _origin(resolved.job, key, values[key]))
        document.add(section, table)
    return tomlkit.dumps(document)


def write_keys(path: Path, changes: dict[str, Any]) -> None:
    """Set `section.key` values in a job file, keeping its comments and order."""
    document = tomlkit.parse(path.read_text(encoding="utf-8"))
    for dotted, value in changes.items():
        section, key = dotted.split(".")
        if section not in document:
            document.add(section, tomlkit.table())
        document[section][key] = value
    path.write_text(tomlkit.dumps(document), encoding="utf-8")


def _add(table: Table, name: str, value: Any, origin: str) -> None:
    if value is None or value == {}:
        table.add(tomlkit.comment(f"{name}: does not apply"))
        return
    item = _inline(value) if isinstance(value, dict) else tomlkit.item(value)
    item.comment(origin)
    table.add(name, item)


def _inline(value: dict[str, Any]) -> InlineTable:
    table = tomlkit.inline_table()
    table.update({key: _inline(inner) if isinstance(inner, dict) else inner for key, inner in value.items()})
    return table


def _origin(job: Job, key: str, value: Any) -> str:
    if not job.is_set(key):
        section, name = key.split(".")
        held = getattr(getattr(job, section), name)
        return "default" if _plain(held) == value else "derived"
    return job.origin(key)


def _plain(value: Any) -> Any:
    """Only what TOML can hold: strings, numbers, lists and tables without None."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, bool | str) or value is None:
        return value
    if isinstance(value, Seconds):
        return f"{value:g}s"
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    if isinstance(value, msgspec.Struct):
        return _plain(msgspec.to_builtins(value))
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items() if v is not None}
    return str(value)

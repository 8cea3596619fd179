"""`plan --fixed`: the given layout, its state bytes and every reason why it cannot run. No search, no torch."""

from __future__ import annotations

from typing import Any

import msgspec

from paceline.checkpoint.space import checkpoint_bytes
from paceline.cluster.measured import MeasuredCluster
from paceline.job.memory_advice import memory_advice
from paceline.job.resolve import Resolved
from paceline.parallel.fsdp.config import fsdp_config
from paceline.parallel.memory import RankMemory, rank_memory
from paceline.plan.own_memory import three_figures
from paceline.plan.traffic import traffic
from paceline.units import format_bytes, format_percent, format_seconds

NOT_MODELLED = "step time and money are not predicted here: their fields are null"


def fixed_plan(
    resolved: Resolved, cluster: str, ranks_per_node: int | None = None, measured: MeasuredCluster | None = None
) -> dict[str, Any]:
    """The document of `plan --fixed --json`, less its schema. All ranks are on one node unless said otherwise.

    Where the cluster was measured, each collective has its seconds.
    """
    reason = None if resolved.fits else misfit(resolved)
    chosen = {
        "layout": {**resolved.layout.to_record(), "microbatch": resolved.batch.microbatch,
                   "accumulation": resolved.batch.accumulation},
        "fits": resolved.fits,
        "memory": {
            "stages": [m.to_record() for m in resolved.stages],
            "heaviest": resolved.heaviest,
            **three_figures(resolved),
        },
        "memory_available_bytes": resolved.memory_available_bytes,
        "checkpoint_bytes": checkpoint_size(resolved),
        "axes": axes(resolved, ranks_per_node),
        "zero_stages": [{"zero_stage": stage, "memory": memory.to_record()} for stage, memory in by_stage(resolved).items()],
        "collectives": traffic(resolved, ranks_per_node, measured),
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
            NOT_MODELLED,
            *([] if measured is None else measured.dates()),
        ],
        "derivations": [msgspec.structs.asdict(d) for d in resolved.derivations],
    }


def checkpoint_size(resolved: Resolved) -> int:
    """Bytes of one checkpoint of the job."""
    width = 8 if resolved.precision == "fp64" else 4
    return checkpoint_bytes(resolved.spec, resolved.job.optimizer, width)


def misfit(resolved: Resolved) -> str:
    """Why the layout does not fit, with the parts and the cheapest change."""
    parts, change = memory_advice(resolved)
    return (
        f"{format_bytes(resolved.memory.total_bytes)} per rank are needed and "
        f"{format_bytes(resolved.memory_available_bytes)} are there: {parts}. {change}"
    )


def axes(resolved: Resolved, ranks_per_node: int | None) -> dict[str, dict[str, Any]]:
    """The axes that split something: their degrees, and whether their ranks share a node."""
    layout = resolved.layout
    return {
        axis: {"degree": degree, "place": layout.place(axis, ranks_per_node or layout.world_size)}
        for axis, degree in layout.degrees().items()
        if degree > 1
    }


def by_stage(resolved: Resolved) -> dict[int, RankMemory]:
    """Memory of each rank under every stage, in the given layout; nothing where there is no choice."""
    if resolved.layout.dp_shard == 1 or resolved.layout.pp > 1:
        return {}
    stages: dict[int, RankMemory] = {}
    for stage in (1, 2, 3):
        parallel = msgspec.structs.replace(resolved.job.parallel, zero_stage=stage)
        stages[stage] = rank_memory(
            resolved.spec, resolved.layout, resolved.batch, resolved.job.optimizer, resolved.ddp,
            fsdp_config(parallel, resolved.precision), transforms=resolved.transforms,
            sequence_length=resolved.job.data.sequence_length, precision=resolved.precision,
            device_kind=resolved.host.device_kind, tensor=resolved.tensor,
            context=resolved.context,
        )  # fmt: skip
    return stages


def describe(resolved: Resolved, document: dict[str, Any]) -> str:
    """The plan as text."""
    memory = resolved.memory.to_record()
    rows = [f"  {key.removesuffix('_bytes'):<12} {format_bytes(size):>12}" for key, size in memory.items() if size]
    collectives = [_collective_line(c) for c in document["chosen"]["collectives"]]
    parts = ("parameters", "gradients", "moments", "gathered", "buffers", "total")
    stages = [
        f"  zero_stage {entry['zero_stage']}: "
        + ", ".join(f"{part} {format_bytes(entry['memory'][f'{part}_bytes'])}" for part in parts)
        for entry in document["chosen"]["zero_stages"]
    ]
    pipelined = [
        f"  stages of rank {rank} of pp: {format_bytes(entry['total_bytes'])}"
        for rank, entry in enumerate(document["chosen"]["memory"]["stages"])
    ]
    places = [f"  {axis} = {entry['degree']}, {entry['place']}" for axis, entry in document["chosen"]["axes"].items()]
    verdict = "fits" if resolved.fits else f"does not fit: {document['rejected'][0]['reason']}"
    return "\n".join(
        [
            f"layout: {resolved.layout}",
            *time_lines(document["chosen"]),
            *places,
            *(f"  {d}" for d in resolved.derivations),
            f"memory per rank, of {format_bytes(resolved.memory_available_bytes)}"
            + (f", on rank {resolved.heaviest} of pp, which needs most:" if len(pipelined) > 1 else ":"),
            *rows,
            *(pipelined if len(pipelined) > 1 else []),
            f"a checkpoint: {format_bytes(document['chosen']['checkpoint_bytes'])}",
            *(["by stage, per rank:"] if stages else []),
            *stages,
            "collectives:" if collectives else "collectives: none",
            *collectives,
            memory_line(document["chosen"]["memory"]),
            verdict,
            *(f"  {way}" for way in document.get("would_fit", ())),
        ]
    )


def memory_line(memory: dict[str, Any]) -> str:
    """The three figures of the rank that needs most, and how likely they are to be too small."""
    three = ", ".join(f"{name} {format_bytes(memory[f'{name}_bytes'])}" for name in ("allocated", "reserved", "device"))
    low, high = (format_bytes(memory[f"device_{p}_bytes"]) for p in ("p10", "p90"))
    return (
        f"{three} ({low} to {high} with a probability of 80%); out of memory with a probability of "
        f"{format_percent(memory['oom_probability'])}"
    )


def time_lines(chosen: dict[str, Any]) -> list[str]:
    """The predicted step and where its seconds go; nothing where none is predicted."""
    seconds = chosen["step_seconds"]
    if seconds is None:
        return []
    parts = [f"{name} {format_seconds(spent)}" for name, spent in chosen["step_parts"].items() if spent]
    low, high = (format_seconds(chosen[f"step_{p}_seconds"]) for p in ("p10", "p90"))
    return [
        f"  a step: {format_seconds(seconds)}, {low} to {high} with a probability of 80%; "
        f"{chosen['tokens_per_second_per_device']:,.0f} tokens/s a device, mfu {format_percent(chosen['mfu'])}",
        f"  of it: {', '.join(parts)}",
    ]


def _collective_line(record: dict[str, Any]) -> str:
    size = format_bytes(record["size_bytes"])
    line = f"  {record['count']} x {record['kind']} over {record['axis']} per step, {size} in all ({record['purpose']})"
    if record["seconds"] is None:
        return line
    return f"{line}: {format_seconds(record['seconds'])} +- {format_percent(record['seconds_error'])} as measured"

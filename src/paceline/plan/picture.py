"""A plan as a picture: one step of the pipeline on a clock, and memory by stage beside what the device has. No torch.

One HTML file, as a report is. Geometry is made here, the template draws it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from paceline.cluster.spec import Cluster
from paceline.errors import JobError
from paceline.job.load import Job
from paceline.job.resolve import resolve_job
from paceline.page.charts import WIDTH, ticks
from paceline.page.render import render_page
from paceline.parallel.pipeline.balance import layer_costs, stage_costs
from paceline.parallel.pipeline.config import SCHEDULES, PipelineConfig
from paceline.parallel.pipeline.player import Play, StageSeconds, play
from paceline.parallel.pipeline.rules import takes
from paceline.plan.device_memory import predict_memory
from paceline.plan.own_memory import pipeline_of
from paceline.plan.setting import DeviceMemory, Setting, StageMemory, StepTime
from paceline.plan.setting_of import setting_of
from paceline.plan.step_time import predict_step
from paceline.plan.verdict import usable_bytes
from paceline.plan.weigh import with_keys
from paceline.run.files import is_no_space, write_atomic
from paceline.units import format_bytes, format_percent, format_seconds

ROW, GAP, LEFT, RIGHT, TOP, BOTTOM = 22, 6, 62, 16, 6, 40

MOST_PASSES = 40
"""Passes of a rank that are drawn, forward ones, where the schedule takes so few; the page says how many were left out."""

PASSES = {"F": "forward", "B": "backward", "I": "backward, of inputs", "W": "backward, of weights"}
AFTER = ("reduce_exposed", "optimizer", "other")
"""Parts of a step that follow its passes, drawn behind them."""

PARTS = ("parameters", "gradients", "master", "moments", "gathered", "activations", "logits", "buffers", "reserve",
         "context", "communicators")  # fmt: skip


class Box(NamedTuple):
    """A rectangle of a drawing, its class and what it says when pointed at."""

    x: float
    y: float
    width: float
    height: float
    style: str
    label: str


class Drawing(NamedTuple):
    """Rows of boxes with ticks below, in pixels. `line` is a value to compare with: where, and what it says."""

    width: int
    height: int
    rows: list[tuple[float, str]]
    boxes: list[Box]
    x_ticks: list[tuple[float, str]]
    line: tuple[float, str] | None = None


def write_job_picture(path: Path, job: Job, cluster: Cluster, keys: Mapping[str, Any] | None = None) -> Path:
    """Write the page of a job on a cluster; see `write_picture`.

    Args:
        keys: what a search chose, in place of the job's own layout.
    """
    if keys is not None:
        job = with_keys(job, dict(keys))
    resolved = resolve_job(job, cluster.devices, cluster.host, ranks_per_host=cluster.devices_per_node)
    setting = setting_of(resolved, cluster)
    return write_picture(path, setting, predict_step(setting))


def write_picture(path: Path, setting: Setting, step: StepTime | None) -> Path:
    """Write the page; returns where it is.

    Raises:
        JobError: the place cannot be written.
        DiskFull: no space.
    """
    try:
        write_atomic(path, picture(setting, step))
    except OSError as error:
        if is_no_space(error):
            raise
        raise JobError(
            f"cannot write the picture to {path}: {error.strerror}",
            values={"path": str(path)},
            hint="Give a path that you may write with --picture.",
        ) from None
    return path


def picture(setting: Setting, step: StepTime | None) -> str:
    """The page of a setting; without a `step` the passes have lengths in proportion to their arithmetic."""
    memory = predict_memory(setting)
    played, count = _played(setting)
    document = {
        "name": setting.name,
        "layout": setting.layout.to_record(),
        "memory": msgspec.to_builtins(memory),
        "step": None if step is None else msgspec.to_builtins(step),
    }
    return render_page(
        "paceline.plan",
        "picture.html",
        document,
        setting=setting,
        memory=memory,
        step=step,
        usable=usable_bytes(setting),
        timeline=None if played is None else timeline(played, _scale(setting, played, step), step),
        waiting=_waiting(played, step),
        drawn=count,
        bars=bars(memory.stages, usable_bytes(setting)),
        parts=[part for part in PARTS if any(stage.parts.get(part) for stage in memory.stages)],
        notes=_notes(setting, memory),
    )


def timeline(played: Play, scale: float, step: StepTime | None) -> Drawing:
    """Each rank's passes on one clock, and what follows them.

    Args:
        scale: seconds of one unit of the play; 0 where there are none.
    """
    tail = [(name, seconds) for name, seconds in _after(step).items() if scale] if step is not None else []
    end = played.step_seconds + sum(seconds for _, seconds in tail) / (scale or 1)
    wide = (WIDTH - LEFT - RIGHT) / end

    def box(begin: float, stop: float, rank: int, style: str, label: str) -> Box:
        span = f", {format_seconds((stop - begin) * scale)}" if scale else ""
        return Box(round(LEFT + begin * wide, 2), TOP + rank * (ROW + GAP), round((stop - begin) * wide, 2), ROW, style,
                   label + span)  # fmt: skip

    boxes = [
        box(p.begin, p.end, rank, f"pass-{p.action.kind}",
            f"{PASSES[p.action.kind]} of micro-batch {p.action.microbatch}, stage {p.action.stage}")
        for rank, passes in enumerate(played.ranks) for p in passes if p.end > p.begin
    ]  # fmt: skip
    at = played.step_seconds
    for name, seconds in tail:
        if seconds > 0:
            stop = at + seconds / scale
            boxes += [box(at, stop, rank, f"part-{name}", name.replace("_", " ")) for rank in range(len(played.ranks))]
            at = stop
    marks = ticks(0.0, end * (scale or 1), 8)
    unit = scale or 1
    shown = [(round(LEFT + m / unit * wide, 1), format_seconds(m) if scale and m else f"{m:g}") for m in marks]
    return _drawing(len(played.ranks), [f"rank {rank}" for rank in range(len(played.ranks))], boxes, shown)


def bars(stages: Sequence[StageMemory], usable: int) -> Drawing:
    """A bar of parts for each stage, beside what a device gives."""
    most = max(usable, *(stage.device_bytes for stage in stages))
    wide = (WIDTH - LEFT - RIGHT) / most
    boxes = []
    for row, stage in enumerate(stages):
        at = float(LEFT)
        for part in PARTS:
            size = stage.parts.get(part, 0)
            if size > 0:
                boxes.append(Box(round(at, 2), TOP + row * (ROW + GAP), round(size * wide, 2), ROW, f"memory-{part}",
                                 f"{part} {format_bytes(size)}"))  # fmt: skip
                at += size * wide
    marks = [m for m in ticks(0.0, float(most) / 2**30, 8) if m * 2**30 <= most]
    shown = [(round(LEFT + m * 2**30 * wide, 1), f"{m:g} GiB") for m in marks]
    names = [f"stage {stage.stage}" for stage in stages]
    limit = (round(LEFT + usable * wide, 1), f"device {format_bytes(usable)}")
    return _drawing(len(stages), names, boxes, shown)._replace(line=limit)


def _drawing(count: int, names: list[str], boxes: list[Box], marks: list[tuple[float, str]]) -> Drawing:
    rows = [(TOP + row * (ROW + GAP) + ROW * 0.7, name) for row, name in enumerate(names)]
    inside = [(x, label) for x, label in marks if x <= WIDTH - RIGHT + 1]
    return Drawing(WIDTH, TOP + count * (ROW + GAP) + BOTTOM, rows, boxes, inside)


def _played(setting: Setting) -> tuple[Play | None, int]:
    """The step played in units of arithmetic, and how many micro-batches are drawn; None for schedules of others."""
    if setting.layout.pp == 1:
        config = PipelineConfig("1f1b", 1, 1, (setting.spec.num_layers,))
    elif setting.schedule in SCHEDULES:
        config = pipeline_of(setting)
    else:
        return None, 0
    count = _drawn(config, setting.accumulation)
    costs = layer_costs(setting.spec, setting.sequence_length)
    again = 1.0 if setting.recompute == "full" else 0.0
    stages = [StageSeconds(c, c * (1 + again), c) for c in stage_costs(costs, config.layers)]
    return play(config, count, stages), count


def _drawn(config: PipelineConfig, microbatches: int) -> int:
    """Micro-batches that are drawn: all, or as many as the page holds and the schedule takes."""
    most = max(config.ranks, MOST_PASSES // config.stages_per_rank)
    if microbatches <= most:
        return microbatches
    fitting = (m for m in range(most, 0, -1) if takes(config.schedule, config.ranks, config.stages_per_rank, m))
    return next(fitting, microbatches)


def _scale(setting: Setting, played: Play, step: StepTime | None) -> float:
    """Seconds of one unit of the play: forward, backward and the exchanges within them, for all micro-batches alike."""
    if step is None:
        return 0.0
    within = step.parts.get("reduce_exposed", 0.0) - _after(step)["reduce_exposed"]
    computing = step.parts.get("forward", 0.0) + step.parts.get("backward", 0.0) + within
    busy = sum(played.busy_seconds) / len(played.busy_seconds)
    whole = setting.accumulation * busy / max(1, _count(played))
    return computing / whole if whole else 0.0


def _after(step: StepTime) -> dict[str, float]:
    """Seconds of what follows the passes of a step; of the reduction what is left over then, not what waits within them."""
    found = {name: step.parts.get(name, 0.0) for name in AFTER}
    return {
        **found,
        "reduce_exposed": min(found["reduce_exposed"], step.detail.get("data_left", found["reduce_exposed"])),
    }


def _waiting(played: Play | None, step: StepTime | None) -> float | None:
    """Share of a step in which ranks wait for each other; of the passes alone where no step is predicted."""
    if step is not None:
        return step.parts.get("bubble", 0.0) / step.seconds
    return None if played is None else played.bubble


def _count(played: Play) -> int:
    return 1 + max((p.action.microbatch for p in played.ranks[0]), default=0)


def _notes(setting: Setting, memory: DeviceMemory) -> list[str]:
    low, high = format_bytes(memory.device_p10_bytes), format_bytes(memory.device_p90_bytes)
    return [
        f"stage {memory.stage} needs most: {format_bytes(memory.allocated_bytes)} allocated, "
        f"{format_bytes(memory.reserved_bytes)} reserved, {format_bytes(memory.device_bytes)} on the device",
        f"eight runs of ten need between {low} and {high} of the device; "
        f"the chance to run out of memory is {format_percent(memory.oom_probability)}",
        *setting.assumed,
    ]

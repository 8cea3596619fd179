"""Runs of ours as rows of the scoreboard: what a run directory says was measured, beside the setting that its job gives.

The machine is taken to be this one, with what `paceline bench --save` measured of it where there is a `cluster.toml`.
Imports no torch.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import msgspec

from paceline.cluster.probe import probe_host
from paceline.cluster.spec import HERE, Cluster, parse_cluster
from paceline.errors import UsageError
from paceline.job.load import load_job
from paceline.job.resolve import resolve_job
from paceline.plan.rows import PublishedRun, strategy_of
from paceline.plan.setting_of import setting_of
from paceline.run.records import latest_steps, read_records

SOURCE = "own"

WARM_STEPS = 3
"""First steps of a run that are left out: they compile, fill caches and allocate."""


def read_own_run(folder: Path) -> PublishedRun:
    """The run in a directory.

    Raises:
        UsageError: it holds no run of ours that took a step.
        JobError: its job does not resolve on the ranks that it ran on.
    """
    records = list(read_records(folder, kinds=("run_started", "step", "run_finished")))
    started = next((r for r in reversed(records) if r["kind"] == "run_started"), None)
    steps = latest_steps(r for r in records if r["kind"] in ("run_started", "step"))
    if started is None or not steps or not (folder / "job.toml").is_file():
        raise UsageError(
            f"{folder} holds no run that took a step",
            key="--against",
            values={"path": str(folder), "steps": len(steps)},
            hint="Give the directory of a run, such as runs/tiny, or a file of published runs.",
        )
    cluster = _cluster(int(started["world_size"]))
    job = load_job(folder / "job.toml")
    resolved = resolve_job(job, int(started["world_size"]), cluster.host)
    setting = setting_of(resolved, cluster)
    return PublishedRun(
        id=job.name,
        source=SOURCE,
        device=setting.device.key,
        quality="A",
        setting=setting,
        measured=measured_figures(records, steps, cluster.host.device_kind),
        strategy=strategy_of(setting),
    )


def _cluster(ranks: int) -> Cluster:
    cluster = parse_cluster(HERE, probe_host())
    return msgspec.structs.replace(cluster, devices_per_node=ranks)


def measured_figures(records: list[dict[str, Any]], steps: list[dict[str, Any]], device_kind: str) -> dict[str, float]:
    """The median of the steps once it is warm; the peak of the rank that held most."""
    warm = steps[WARM_STEPS:] or steps
    peaks = [max(r["peak_memory_bytes"]) for r in records if r["kind"] == "run_finished" and r.get("peak_memory_bytes")]
    figure = "memory_device_bytes" if device_kind == "cpu" else "memory_allocated_bytes"
    memory = {figure: float(max(peaks))} if peaks else {}
    return {"step_seconds": statistics.median(float(s["seconds"]) for s in warm), **memory, "fits": 1.0}

"""A run of ours as one that was published: its setting from the job that it kept, its step from its records. No torch."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import msgspec

from paceline.cluster.probe import probe_host
from paceline.cluster.spec import HERE, parse_cluster
from paceline.errors import UsageError
from paceline.job.load import load_job
from paceline.job.resolve import resolve_job
from paceline.plan.rows import PublishedRun, strategy_of
from paceline.plan.setting_of import setting_of
from paceline.run.records import latest_steps, read_records

WARM = 5
"""Steps at a run's beginning that say nothing of the others: memory is taken, kernels are chosen."""


def own_run(directory: Path) -> PublishedRun:
    """The last attempt of a run on this host.

    The cluster is `here`, with what `cluster.toml` in the working directory says of it.

    Raises:
        UsageError: it is no run directory, has too few steps, or is of another host.
    """
    records = list(read_records(directory, kinds=("run_started", "step", "run_finished")))
    started = [record for record in records if record["kind"] == "run_started"]
    job_file = directory / "job.toml"
    if not started or not job_file.is_file():
        raise UsageError(
            f"{directory} is no run directory: it has {'no job.toml' if started else 'no records of a run'}",
            key="--against",
            values={"path": str(directory)},
            hint="Name a directory that paceline train wrote, such as runs/tiny, or a file of published runs.",
        )
    last = started[-1]
    host = probe_host()
    if last.get("host") not in ("", None, host.name):
        raise UsageError(
            f"{directory} ran on {last['host']}, and this host is {host.name}",
            key="--against",
            values={"ran_on": last["host"], "host": host.name},
            hint="Give the command there; what is predicted is this host.",
        )
    steps = [record for record in records if record["kind"] != "run_finished"]
    measured = {"step_seconds": _seconds(steps, last, directory), **peak_memory(records, host.device_kind)}
    ranks = int(last["world_size"])
    cluster = msgspec.structs.replace(parse_cluster(HERE, host), devices_per_node=ranks)
    setting = setting_of(resolve_job(load_job(job_file), ranks, host), cluster)
    return PublishedRun(
        id=str(directory), source="own run", device=setting.device.key, quality="", setting=setting,
        measured=measured, strategy=strategy_of(setting), group=str(directory),
    )  # fmt: skip


def _seconds(records: list[dict[str, Any]], started: dict[str, Any], directory: Path) -> float:
    steps = [r for r in latest_steps(records) if r["kind"] == "step" and r["attempt"] == started["attempt"]]
    warm = steps[WARM:]
    if not warm:
        raise UsageError(
            f"{directory} has {len(steps)} steps in its last attempt, and the first {WARM} do not count",
            key="--against",
            values={"steps": len(steps), "left_out": WARM},
            hint=f"Train for {4 * WARM} steps or more.",
        )
    return statistics.median(float(step["seconds"]) for step in warm)


def peak_memory(records: list[dict[str, Any]], device_kind: str) -> dict[str, float]:
    """The peak of the rank that held most in any attempt that ended: resident on a CPU, allocated on a GPU."""
    ended = [r["peak_memory_bytes"] for r in records if r["kind"] == "run_finished" and r.get("peak_memory_bytes")]
    quantity = "memory_device_bytes" if device_kind == "cpu" else "memory_allocated_bytes"
    return {quantity: float(max(map(max, ended))), "fits": 1.0} if ended else {"fits": 1.0}

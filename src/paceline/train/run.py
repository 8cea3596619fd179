"""`paceline train` on this host: open the run directory, start the workers, watch them, and sum up. Imports no torch.

The workers are started first and the data is prepared here meanwhile: importing torch costs them seconds.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from paceline.errors import DiskFull, Interrupted, PacelineError, Preempted
from paceline.job.load import Job
from paceline.job.resolve import Resolved, resolve_here
from paceline.run.control import STOP, Control
from paceline.run.directory import RunDirectory
from paceline.run.files import write_atomic
from paceline.run.records import Fault, RunFinished, read_records
from paceline.train.requests import with_what_stands
from paceline.train.shared_run import open_run, worker_environment
from paceline.train.stragglers import stragglers_watched
from paceline.workers import affinity
from paceline.workers.start import WorkerGroup, plan_here, start
from paceline.workers.watch import GroupResult, watch


def supervise(job: Job, words: list[str], plan: Callable[[Resolved], dict[str, Any]]) -> dict[str, Any]:
    """Train the job in local worker processes.

    Args:
        job: the parsed job.
        words: the command line words that made it, which the workers parse again.
        plan: what is predicted for a resolved job, for `plan.json`.

    Returns:
        The summary of `train --json`, less its schema.

    Raises:
        PacelineError: what the run came to, where that is not exit code 0.
    """
    launched = time.time()
    resolved = resolve_here(job)
    with open_run(resolved) as directory:
        _say(*directory.notes)
        if directory.finished is not None:
            _say(f"{directory.path}: this run is done ({directory.finished['steps']} steps); nothing to do")
            return summary(directory, resolved)
        write_atomic(directory.plan_file, json.dumps(plan(resolved), indent=1))
        result = _run_workers(resolved, directory, words, launched)
        if result.error is not None:
            result = _after_a_request(resolved, directory, result)
            _record_failure(directory, result)
            raise result.error
        return summary(directory, resolved)


def summary(directory: RunDirectory, resolved: Resolved) -> dict[str, Any]:
    """The figures of `train --json` from the run's records."""
    finished: dict[str, Any] = {}
    last: dict[str, Any] = {}
    for record in read_records(directory.path, kinds=("step", "run_finished")):
        if record["kind"] == "run_finished":
            finished = record
        else:
            last = record
    kept = ("steps", "eval_loss", "bigram_eval_loss", "tokens", "seconds", "tokens_per_second", "mfu")
    return {
        "run_dir": str(directory.path),
        "attempts": directory.attempt,
        **{key: finished.get(key) for key in kept},
        # An attempt that found all steps done has none of its own.
        "loss": finished.get("loss") if finished.get("loss") is not None else last.get("loss"),
        "grad_norm": last.get("grad_norm"),
        "layout": resolved.layout.to_record(),
        "exit": int(finished.get("exit", 0)),
    }


def _run_workers(resolved: Resolved, directory: RunDirectory, words: list[str], launched: float) -> GroupResult:
    job, procs = resolved.job, resolved.layout.world_size
    # Beside each rank its loader's processes, and on the host the writer of checkpoints.
    cpus = plan_here(procs, job.launch.threads, job.launch.affinity == "auto", helpers=job.data.workers + 1)
    env = {**os.environ, **worker_environment(directory, launched)}
    quota = affinity.cpu_quota()
    with start(
        ["train", *words], procs=procs, run_id=directory.run_id, port=job.launch.port, cpus=cpus, env=env
    ) as group:
        _say(*_opening(resolved, directory))
        _say(affinity.describe(cpus, quota, os.environ), *affinity.warnings(cpus, quota, os.environ))
        # The workers import torch meanwhile; a wrong source is told before they are done, progress on a real terminal.
        # Loaded here, since numpy would cost a command that only explains.
        importlib.import_module("paceline.data.prepare").prepare(job.data)
        with stragglers_watched(directory, resolved.layout, _say):
            return _watched(resolved, group, Control(directory.path))


def _watched(resolved: Resolved, group: WorkerGroup, control: Control) -> GroupResult:
    recovery = resolved.job.recovery
    return watch(
        group, stall_seconds=recovery.stall_seconds, start_seconds=float(recovery.start_timeout),
        stop_seconds=float(recovery.grace), asked=lambda: "paceline stop" if control.asked(STOP) else None,
    )  # fmt: skip


def _after_a_request(resolved: Resolved, directory: RunDirectory, result: GroupResult) -> GroupResult:
    """The same, preempted where it was interrupted and a checkpoint stands."""
    if not isinstance(result.error, Interrupted):
        return result
    place = resolved.job.checkpoint.place(directory.path)
    error = with_what_stands(result.error, place, _last_step(directory))
    return result._replace(error=error, exit_code=error.exit_code)


def _opening(resolved: Resolved, directory: RunDirectory) -> list[str]:
    attempt = f", attempt {directory.attempt}" if directory.attempt > 1 else ""
    return [f"{directory.path}{attempt}: {resolved.layout}", *(f"  {d}" for d in resolved.derivations)]


def _record_failure(directory: RunDirectory, result: GroupResult) -> None:
    """The fault and the verdict, as far as the disk still takes them."""
    error = result.error
    if error is None:
        return
    if isinstance(error, Preempted) and "seconds" in error.values:
        return  # rank 0 has recorded it
    steps = _last_step(directory)
    try:
        with directory.writer("supervisor") as writer:
            if not isinstance(error, Preempted | Interrupted):
                writer.write(_fault(error, result, steps))
            writer.write(RunFinished(step=steps, exit=error.exit_code, reason=error.message, steps=steps, samples=0))
    except (DiskFull, PacelineError) as full:
        _say(f"the failure could not be recorded: {full}")


def _fault(error: PacelineError, result: GroupResult, step: int) -> Fault:
    return Fault(
        step=step, rank=result.rank, host=os.uname().nodename, kind_of_fault=type(error).__name__,
        evidence=result.traceback or "", message=error.message,
    )  # fmt: skip


def _last_step(directory: RunDirectory) -> int:
    return max((int(r["step"]) for r in read_records(directory.path, kinds=("step",))), default=0)


def _say(*lines: str) -> None:
    for line in lines:
        print(line, file=sys.stderr, flush=True)

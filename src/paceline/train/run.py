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

from paceline.errors import Interrupted, PacelineError
from paceline.job.load import Job
from paceline.job.resolve import Resolved, resolve_here
from paceline.run.control import STOP, Control
from paceline.run.directory import RunDirectory
from paceline.run.files import write_atomic
from paceline.run.records import read_records
from paceline.train.attempts import Account, attempt_of, last_step
from paceline.train.requests import with_what_stands
from paceline.train.shared_run import open_run, worker_environment
from paceline.train.stragglers import stragglers_watched
from paceline.units import format_seconds
from paceline.workers import affinity
from paceline.workers.decide import interrupted
from paceline.workers.interrupts import Asked, Interrupts, raising
from paceline.workers.limits import Limits
from paceline.workers.start import WorkerGroup, plan_here, start
from paceline.workers.supervise import End, Restart, Supervision
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
    # What is not watched is left at the first request: the start of workers, and the wait before it.
    with raising(), open_run(resolved) as directory:
        _say(*directory.notes)
        if directory.finished is not None:
            _say(f"{directory.path}: this run is done ({directory.finished['steps']} steps); nothing to do")
            return summary(directory, resolved)
        write_atomic(directory.plan_file, json.dumps(plan(resolved), indent=1))
        error = _attempts(resolved, directory, words, launched)
        if error is not None:
            raise error
        return summary(directory, resolved)


def _attempts(resolved: Resolved, directory: RunDirectory, words: list[str], launched: float) -> PacelineError | None:
    """Attempt after attempt under the one lease, as the policy says; the error that the run ends with, if any."""
    account = Account(directory)
    try:
        end, step = _until_the_end(resolved, directory, account, words, launched)
    except Asked as asked:
        end, step = End(interrupted(asked.how, [], None)), last_step(directory)
    if end.error is None:
        return None
    error = end.error
    if isinstance(error, Interrupted):
        error = with_what_stands(error, resolved.job.checkpoint.place(directory.path), last_step(directory))
    with Interrupts():
        account.end(error, step)
        _say(*account.notes, *_traceback(end.traceback))
    return error


def _until_the_end(
    resolved: Resolved, directory: RunDirectory, account: Account, words: list[str], launched: float
) -> tuple[End, int]:
    """How the last attempt ended, and at which step."""
    recovery = resolved.job.recovery
    policy = Supervision(recovery.max_restarts, float(recovery.backoff), restart_stalled=recovery.on_stall != "stop")
    limits = Limits(None if recovery.stall_timeout is None else float(recovery.stall_timeout))
    while True:
        limits.next_attempt()
        result = _run_workers(resolved, directory, account, limits, words, launched, first=policy.attempts == 0)
        if result.error is not None and result.error.values.get("sure") is False:
            limits.doubt_was_costly()
        attempt = attempt_of(result, directory)
        outcome = policy.after(attempt)
        if result.error is not None:
            account.fault(result, result.error, attempt.reached)
        if isinstance(outcome, End):
            return outcome, attempt.reached
        _say(*(() if outcome.again else _traceback(attempt.traceback)))
        _say(_restart_line(outcome, directory.attempt + 1))
        time.sleep(outcome.delay_seconds)
        directory.check_held()
        account.restart(result, outcome.reason, attempt.reached)
        directory.next_attempt()
        launched = time.time()


def _restart_line(outcome: Restart, attempt: int) -> str:
    wait = f" in {format_seconds(outcome.delay_seconds)}" if outcome.delay_seconds else ""
    same = "the same failure again: " if outcome.again else ""
    return f"paceline: {same}{outcome.reason}; starting attempt {attempt}{wait}"


def _traceback(text: str | None) -> list[str]:
    return [text.rstrip()] if text else []


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


def _run_workers(
    resolved: Resolved, directory: RunDirectory, account: Account, limits: Limits, words: list[str], launched: float,
    *, first: bool,
) -> GroupResult:  # fmt: skip
    """One attempt; the `first` of the command says what it runs on, and prepares the data."""
    job, procs = resolved.job, resolved.layout.world_size
    # Beside each rank its loader's processes, and on the host the writer of checkpoints.
    cpus = plan_here(procs, job.launch.threads, job.launch.affinity == "auto", helpers=job.data.workers + 1)
    env = {**os.environ, **worker_environment(directory, launched)}
    quota = affinity.cpu_quota()
    with start(
        ["train", *words], procs=procs, run_id=directory.run_id, port=job.launch.port, cpus=cpus, env=env
    ) as group:
        if first:
            _say(*_opening(resolved, directory))
            _say(affinity.describe(cpus, quota, os.environ), *affinity.warnings(cpus, quota, os.environ))
            # The workers import torch meanwhile; a wrong source is told before they are done, progress on a real
            # terminal. Loaded here, since numpy would cost a command that only explains.
            importlib.import_module("paceline.data.prepare").prepare(job.data)
        with stragglers_watched(directory, resolved.layout, _say, resolved.job.recovery.on_straggler):
            return _watched(resolved, directory, account, limits, group)


def _watched(
    resolved: Resolved, directory: RunDirectory, account: Account, limits: Limits, group: WorkerGroup
) -> GroupResult:
    recovery, control = resolved.job.recovery, Control(directory.path)
    return watch(
        group, stall_seconds=recovery.stall_seconds, start_seconds=float(recovery.start_timeout),
        stop_seconds=float(recovery.grace), asked=lambda: f"control/{STOP}" if control.asked(STOP) else None,
        check=directory.check_beat, tells=False, limits=limits, act=recovery.on_stall != "log", warn=account.suspicion,
    )  # fmt: skip


def _opening(resolved: Resolved, directory: RunDirectory) -> list[str]:
    attempt = f", attempt {directory.attempt}" if directory.attempt > 1 else ""
    return [f"{directory.path}{attempt}: {resolved.layout}", *(f"  {d}" for d in resolved.derivations)]


def _say(*lines: str) -> None:
    for line in lines:
        print(line, file=sys.stderr, flush=True)

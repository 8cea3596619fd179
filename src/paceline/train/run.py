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
from paceline.job.resolve import Resolved
from paceline.run.control import STOP, Control
from paceline.run.directory import RunDirectory
from paceline.run.files import write_atomic
from paceline.train.attempts import Account, attempt_of, last_step, restart_line, summary, traceback_lines
from paceline.train.elastic import Ranks, resolve_range
from paceline.train.requests import with_what_stands
from paceline.train.shared_run import open_run, worker_environment
from paceline.train.stragglers import stragglers_watched
from paceline.workers import affinity
from paceline.workers.decide import interrupted
from paceline.workers.interrupts import Asked, Interrupts, raising
from paceline.workers.limits import Limits
from paceline.workers.start import WorkerGroup, plan_here, start
from paceline.workers.supervise import End, Supervision
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
    sizes = resolve_range(job)
    resolved = next(iter(sizes.values()))
    # What is not watched is left at the first request: the start of workers, and the wait before it.
    with raising(), open_run(resolved) as directory:
        _say(*directory.notes)
        if directory.finished is not None:
            _say(f"{directory.path}: this run is done ({directory.finished['steps']} steps); nothing to do")
            return summary(directory, resolved)
        ranks = Ranks(
            sizes, Control(directory.path), _say, environment=os.environ,
            without_suspects=job.recovery.on_straggler == "restart-without",
        )  # fmt: skip
        error = _attempts(ranks, directory, words, launched, plan)
        if error is not None:
            raise error
        return summary(directory, ranks.resolved)


def _attempts(
    ranks: Ranks, directory: RunDirectory, words: list[str], launched: float, plan: Callable[[Resolved], dict[str, Any]]
) -> PacelineError | None:
    """Attempt after attempt under the one lease, as the policy says; the error that the run ends with, if any."""
    account = Account(directory)
    try:
        end, step = _until_the_end(ranks, directory, account, words, launched, plan)
    except Asked as asked:
        end, step = End(interrupted(asked.how, [], None)), last_step(directory)
    if end.error is None:
        return None
    error = end.error
    if isinstance(error, Interrupted):
        error = with_what_stands(error, ranks.resolved.job.checkpoint.place(directory.path), last_step(directory))
    with Interrupts():
        account.end(error, step)
        _say(*account.notes, *traceback_lines(end.traceback))
    return error


def _until_the_end(
    ranks: Ranks, directory: RunDirectory, account: Account, words: list[str], launched: float,
    plan: Callable[[Resolved], dict[str, Any]],
) -> tuple[End, int]:  # fmt: skip
    """How the last attempt ended, and at which step."""
    recovery, opened = ranks.resolved.job.recovery, 0
    policy = Supervision(recovery.max_restarts, float(recovery.backoff), restart_stalled=recovery.on_stall != "stop")
    limits = Limits(None if recovery.stall_timeout is None else float(recovery.stall_timeout))
    while True:
        opens, opened = ranks.procs != opened, ranks.procs
        if opens:
            write_atomic(directory.plan_file, json.dumps(plan(ranks.resolved), indent=1))
        limits.next_attempt()
        result = _run_workers(ranks, directory, account, limits, words, launched, opens=opens)
        if result.error is not None and result.error.values.get("sure") is False:
            limits.doubt_was_costly()
        attempt = attempt_of(result, directory)
        if resized := ranks.resized(result):
            launched = account.next_attempt(result, resized, attempt.reached)
            continue
        outcome = policy.after(attempt)
        if result.error is not None:
            account.fault(result, result.error, attempt.reached)
        if isinstance(outcome, End):
            return outcome, attempt.reached
        _say(*(() if outcome.again else traceback_lines(attempt.traceback)))
        _say(*ranks.without(result), restart_line(outcome, directory.attempt + 1))
        time.sleep(outcome.delay_seconds)
        launched = account.next_attempt(result, outcome.reason, attempt.reached)


def _run_workers(
    ranks: Ranks, directory: RunDirectory, account: Account, limits: Limits, words: list[str], launched: float,
    *, opens: bool,
) -> GroupResult:  # fmt: skip
    """One attempt; one that `opens` says what it runs on, and prepares the data."""
    job, procs = ranks.resolved.job, ranks.procs
    # Beside each rank its loader's processes, and on the host the writer of checkpoints.
    cpus = plan_here(procs, job.launch.threads, job.launch.affinity == "auto", helpers=job.data.workers + 1)
    env = {**os.environ, **ranks.environment, **worker_environment(directory, launched)}
    quota = affinity.cpu_quota()
    with start(
        ["train", *words], procs=procs, run_id=directory.run_id, port=job.launch.port, cpus=cpus, env=env
    ) as group:
        if opens:
            _say(*_opening(ranks.resolved, directory))
            _say(affinity.describe(cpus, quota, os.environ), *affinity.warnings(cpus, quota, os.environ))
            # The workers import torch meanwhile; a wrong source is told before they are done, progress on a real
            # terminal. Loaded here, since numpy would cost a command that only explains.
            importlib.import_module("paceline.data.prepare").prepare(job.data)
        with stragglers_watched(directory, ranks.resolved.layout, _say, job.recovery.on_straggler):
            return _watched(ranks, directory, account, limits, group)


def _watched(
    ranks: Ranks, directory: RunDirectory, account: Account, limits: Limits, group: WorkerGroup
) -> GroupResult:
    recovery, control = ranks.resolved.job.recovery, Control(directory.path)
    return watch(
        group, stall_seconds=recovery.stall_seconds, start_seconds=float(recovery.start_timeout),
        stop_seconds=float(recovery.grace), asked=lambda: f"control/{STOP}" if control.asked(STOP) else ranks.asked(),
        check=directory.check_beat, tells=False, limits=limits, act=recovery.on_stall != "log", warn=account.suspicion,
    )  # fmt: skip


def _opening(resolved: Resolved, directory: RunDirectory) -> list[str]:
    attempt = f", attempt {directory.attempt}" if directory.attempt > 1 else ""
    return [f"{directory.path}{attempt}: {resolved.layout}", *(f"  {d}" for d in resolved.derivations)]


def _say(*lines: str) -> None:
    for line in lines:
        print(line, file=sys.stderr, flush=True)

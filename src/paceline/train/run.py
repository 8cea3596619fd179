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
from paceline.run.records import read_records
from paceline.train.attempts import Account, attempt_of
from paceline.train.elastic import Ranks, resolve_range
from paceline.train.requests import with_what_stands
from paceline.train.shared_run import open_run, worker_environment
from paceline.units import format_seconds
from paceline.workers import affinity, decide
from paceline.workers.interrupts import Asked, raising
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
    sizes = resolve_range(job)
    resolved = next(iter(sizes.values()))
    with raising(), open_run(resolved) as directory:
        _say(*directory.notes)
        if directory.finished is not None:
            _say(f"{directory.path}: this run is done ({directory.finished['steps']} steps); nothing to do")
            return summary(directory, resolved)
        ranks = Ranks(
            sizes, Control(directory.path), _say, environment=os.environ,
            without_suspects=job.recovery.on_straggler == "restart-without",
        )  # fmt: skip
        try:
            error = _attempts(ranks, directory, words, launched, plan)
        except Asked as asked:  # while no workers are watched: data is prepared, or an attempt waits for its start
            step = max((int(r["step"]) for r in read_records(directory.path, kinds=("step",))), default=0)
            error = _what_stands(resolved, directory, decide.interrupted(asked.how, [], None), step)
            Account(directory).end(error, step)
        if error is not None:
            raise error
        return summary(directory, ranks.resolved)


def _attempts(
    ranks: Ranks, directory: RunDirectory, words: list[str], launched: float, plan: Callable[[Resolved], dict[str, Any]]
) -> PacelineError | None:
    """Attempt after attempt under the one lease, as the policy says; the error that the run ends with, if any."""
    recovery, account, opened = ranks.resolved.job.recovery, Account(directory), 0
    policy = Supervision(recovery.max_restarts, float(recovery.backoff), restart_stalled=recovery.on_stall != "stop")
    while True:
        resolved = ranks.resolved
        if ranks.procs != opened:
            write_atomic(directory.plan_file, json.dumps(plan(resolved), indent=1))
        result = _run_workers(ranks, directory, words, launched, opens=ranks.procs != opened)
        opened = ranks.procs
        if isinstance(result.error, Interrupted):
            result = result._replace(error=_what_stands(resolved, directory, result.error, result.reached))
        attempt = attempt_of(result, directory)
        if resized := ranks.resized(result):
            launched = _next(account, directory, result, resized, attempt.reached)
            continue
        outcome = policy.after(attempt)
        if result.error is not None:
            account.fault(result, result.error, attempt.reached)
        if isinstance(outcome, End):
            if outcome.error is not None:
                account.end(outcome.error, attempt.reached)
                _say(*account.notes, *_traceback(outcome.traceback))
            return outcome.error
        _say(*(() if outcome.again else _traceback(attempt.traceback)))
        smaller = ranks.without(result)
        _say(*([f"paceline: {smaller}"] if smaller else []), _restart_line(outcome, directory.attempt + 1))
        time.sleep(outcome.delay_seconds)
        reason = f"{outcome.reason}; {smaller}" if smaller else outcome.reason
        launched = _next(account, directory, result, reason, attempt.reached)


def _next(account: Account, directory: RunDirectory, result: GroupResult, reason: str, step: int) -> float:
    """Go over to the next attempt; returns when that was, in seconds since the epoch."""
    directory.check_held()
    account.restart(result, reason, step)
    directory.next_attempt()
    return time.time()


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
    ranks: Ranks, directory: RunDirectory, words: list[str], launched: float, *, opens: bool
) -> GroupResult:
    """One attempt; one that `opens` says what it runs on, and prepares the data."""
    resolved = ranks.resolved
    job, procs = resolved.job, ranks.procs
    # Beside each rank its loader's processes, and on the host the writer of checkpoints.
    cpus = plan_here(procs, job.launch.threads, job.launch.affinity == "auto", helpers=job.data.workers + 1)
    env = {**os.environ, **ranks.environment, **worker_environment(directory, launched)}
    quota = affinity.cpu_quota()
    with start(
        ["train", *words], procs=procs, run_id=directory.run_id, port=job.launch.port, cpus=cpus, env=env
    ) as group:
        if opens:
            _say(*_opening(resolved, directory))
            _say(affinity.describe(cpus, quota, os.environ), *affinity.warnings(cpus, quota, os.environ))
            # The workers import torch meanwhile; a wrong source is told before they are done, progress on a real
            # terminal. Loaded here, since numpy would cost a command that only explains.
            importlib.import_module("paceline.data.prepare").prepare(job.data)
        return _watched(ranks, directory, group)


def _watched(ranks: Ranks, directory: RunDirectory, group: WorkerGroup) -> GroupResult:
    recovery, control = ranks.resolved.job.recovery, Control(directory.path)

    def asked() -> str | None:
        return f"control/{STOP}" if control.asked(STOP) else ranks.asked()

    return watch(
        group, stall_seconds=recovery.stall_seconds, start_seconds=float(recovery.start_timeout),
        stop_seconds=float(recovery.grace), asked=asked,
        check=directory.check_beat, tells=False,
    )  # fmt: skip


def _what_stands(resolved: Resolved, directory: RunDirectory, error: Interrupted, step: int) -> PacelineError:
    return with_what_stands(error, resolved.job.checkpoint.place(directory.path), step)


def _opening(resolved: Resolved, directory: RunDirectory) -> list[str]:
    attempt = f", attempt {directory.attempt}" if directory.attempt > 1 else ""
    return [f"{directory.path}{attempt}: {resolved.layout}", *(f"  {d}" for d in resolved.derivations)]


def _say(*lines: str) -> None:
    for line in lines:
        print(line, file=sys.stderr, flush=True)

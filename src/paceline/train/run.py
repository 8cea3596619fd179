"""`paceline train` on this host: open the run directory, start the workers, watch them, and sum up. Imports no torch.

The workers are started first and the data is prepared here meanwhile: importing torch costs them seconds.
"""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.errors import Interrupted, PacelineError
from paceline.job.load import Job
from paceline.job.resolve import Resolved
from paceline.run.control import Control
from paceline.run.directory import RunDirectory
from paceline.run.files import write_atomic
from paceline.train.attempts import Account, attempt_of, last_step, restart_line, summary, traceback_lines
from paceline.train.elastic import JobFor, Ranks, resolve_range
from paceline.train.local_attempt import Attempt, run_attempt, say
from paceline.train.requests import with_what_stands
from paceline.train.shared_run import open_run
from paceline.workers.decide import interrupted
from paceline.workers.interrupts import Asked, Interrupts, raising
from paceline.workers.limits import Limits
from paceline.workers.supervise import End, Supervision


def supervise(
    job: Job, words: list[str], plan: Callable[[Resolved], dict[str, Any]], report: Callable[[Path], object],
    job_for: JobFor | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Train the job in local worker processes, beside those of other hosts where it asks for several.

    Args:
        job: the parsed job.
        words: the command line words that made it, which the workers parse again.
        plan: what is predicted for a resolved job, for `plan.json`.
        report: writes the run's report and says where.
        job_for: the job with the layout that is planned for a number of ranks, where it asks for that.

    Returns:
        The summary of `train --json`, less its schema.

    Raises:
        PacelineError: what the run came to, where that is not exit code 0.
    """
    if int(job.launch.nodes or 1) > 1:
        # By name: nodes meet over the engine's store, and its import is spared where there is one.
        nodes = importlib.import_module("paceline.train.nodes")
        document: dict[str, Any] = nodes.supervise_nodes(job, words, plan, report, job_for)
        return document
    launched = time.time()
    sizes = resolve_range(job, job_for=job_for)
    resolved = next(iter(sizes.values()))
    # What is not watched is left at the first request: the start of workers, and the wait before it.
    with raising(), open_run(resolved) as directory:
        say(*directory.notes)
        if directory.finished is not None:
            say(f"{directory.path}: this run is done ({directory.finished['steps']} steps); nothing to do")
            say(f"report: {report(directory.path)}")
            return summary(directory, resolved)
        ranks = Ranks(
            sizes, Control(directory.path), say, environment=os.environ,
            without_suspects=job.recovery.on_straggler == "restart-without",
        )  # fmt: skip
        error = _attempts(ranks, directory, words, launched, plan)
        if error is not None:
            raise error
        say(f"report: {report(directory.path)}")
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
        say(*account.notes, *traceback_lines(end.traceback))
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
        attempt = Attempt(
            ranks.resolved,
            directory,
            words,
            ranks.procs,
            launched,
            ranks.environment,
            ranks.avoided_cpus,
            opens,
            port=ranks.resolved.job.launch.port,
        )
        result = run_attempt(
            attempt, account, limits, asked=ranks.asked, check=directory.check_beat,
            started=lambda group: ranks.started(group.plan),
        )  # fmt: skip
        if result.error is not None and result.error.values.get("sure") is False:
            limits.doubt_was_costly()
        ended = attempt_of(result, directory)
        if resized := ranks.resized(result):
            launched = account.next_attempt(result, resized, ended.reached)
            continue
        outcome = policy.after(ended)
        if result.error is not None:
            account.fault(result, result.error, ended.reached)
        if isinstance(outcome, End):
            return outcome, ended.reached
        say(*(() if outcome.again else traceback_lines(ended.traceback)))
        say(*ranks.without(result), restart_line(outcome, directory.attempt + 1))
        time.sleep(outcome.delay_seconds)
        launched = account.next_attempt(result, outcome.reason, ended.reached)

"""One attempt on this host: the workers started, the data prepared meanwhile, all watched to the end. Imports no torch."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from paceline.errors import PacelineError
from paceline.job.resolve import Resolved
from paceline.run.control import STOP, Control
from paceline.run.directory import RunDirectory
from paceline.train.attempts import Account
from paceline.train.shared_run import worker_environment
from paceline.train.stragglers import stragglers_watched
from paceline.workers import affinity
from paceline.workers.limits import Limits
from paceline.workers.start import ALONE, Place, WorkerGroup, plan_here, start
from paceline.workers.watch import GroupResult, watch


class Attempt(NamedTuple):
    """What the workers of this host are started for.

    words: the command line words that made the job, which the workers parse again.
    procs: ranks on this host.
    environment: variables of the workers beside this process's own.
    avoided_cpus: processors that they are kept off.
    opens: whether it says what it runs on; others before it have not.
    port: where all meet; None for a free one, on node 0.
    is_leader: whether this host keeps the records of the run.
    """

    resolved: Resolved
    directory: RunDirectory
    words: Sequence[str]
    procs: int
    launched: float
    environment: Mapping[str, str] = {}
    avoided_cpus: frozenset[int] = frozenset()
    opens: bool = True
    place: Place = ALONE
    port: int | None = None
    is_leader: bool = True


def run_attempt(
    attempt: Attempt,
    account: Account,
    limits: Limits,
    *,
    asked: Callable[[], str | None],
    check: Callable[[], object],
    elsewhere: Callable[[], PacelineError | None] = lambda: None,
    started: Callable[[WorkerGroup], object] = lambda group: None,
) -> GroupResult:
    """Start the workers of this host and wait until all have ended.

    Args:
        account: told of what looks like a stall.
        asked: how ranks are asked to stop by something else than a signal or `control/stop`, or None.
        check: called again and again; what it raises ends the workers.
        elsewhere: what broke on another host, if anything.
        started: called once the port is bound and the workers are started.
    """
    job = attempt.resolved.job
    # Beside each rank its loader's processes, and on the host the writer of checkpoints.
    cpus = plan_here(
        attempt.procs, job.launch.threads, job.launch.affinity == "auto", helpers=job.data.workers + 1,
        avoided=attempt.avoided_cpus,
    )  # fmt: skip
    env = {**os.environ, **attempt.environment, **worker_environment(attempt.directory, attempt.launched)}
    quota = affinity.cpu_quota()
    with start(
        ["train", *attempt.words], procs=attempt.procs, run_id=attempt.directory.run_id, place=attempt.place,
        port=attempt.port, cpus=cpus, env=env,
    ) as group:  # fmt: skip
        started(group)
        if attempt.opens:
            say(*_opening(attempt))
            say(affinity.describe(cpus, quota, os.environ), *affinity.warnings(cpus, quota, os.environ))
            # The workers import torch meanwhile; a wrong source is told before they are done, progress on a real
            # terminal. Loaded here, since numpy would cost a command that only explains.
            importlib.import_module("paceline.data.prepare").prepare(job.data)
        policy = job.recovery.on_straggler
        stragglers = stragglers_watched(attempt.directory, attempt.resolved.layout, say, policy)
        with stragglers if attempt.is_leader else contextlib.nullcontext():
            return _watched(attempt, group, account, limits, asked, check, elsewhere)


def _watched(
    attempt: Attempt, group: WorkerGroup, account: Account, limits: Limits, asked: Callable[[], str | None],
    check: Callable[[], object], elsewhere: Callable[[], PacelineError | None],
) -> GroupResult:  # fmt: skip
    recovery, control = attempt.resolved.job.recovery, Control(attempt.directory.path)
    return watch(
        group, stall_seconds=recovery.stall_seconds, start_seconds=float(recovery.start_timeout),
        stop_seconds=float(recovery.grace), asked=lambda: f"control/{STOP}" if control.asked(STOP) else asked(),
        check=check, elsewhere=elsewhere, tells=False, limits=limits, act=recovery.on_stall != "log", warn=account.suspicion,
    )  # fmt: skip


def _opening(attempt: Attempt) -> list[str]:
    directory, place = attempt.directory, attempt.place
    number = f", attempt {directory.attempt}" if directory.attempt > 1 else ""
    node = f", node {place.node_rank} of {place.nodes}" if place.nodes > 1 else ""
    head = f"{directory.path}{number}{node}: {attempt.resolved.layout}"
    return [head, *(f"  {d}" for d in attempt.resolved.derivations if attempt.is_leader)]


def say(*lines: str) -> None:
    """Lines for the one who gave the command."""
    for line in lines:
        print(line, file=sys.stderr, flush=True)

"""Starts the local workers of a run as plain subprocesses with torchrun's environment.

Imports no torch: the launcher would pay its import before the workers pay theirs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

from paceline.errors import JobError
from paceline.workers import affinity, environment, near, ports
from paceline.workers.affinity import RankCpus
from paceline.workers.interfaces import GLOO, check_interfaces
from paceline.workers.oom import oom_kills
from paceline.workers.owned_folder import OwnedFolder


class Worker:
    """One local rank: its process and the pipe that carries what it prints."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self.rank = rank
        self.process = process
        self.ended_at: float | None = None
        """CLOCK_MONOTONIC at which its end was seen."""

    @property
    def pid(self) -> int:
        return self.process.pid

    def poll(self) -> int | None:
        """Its exit code (negative: signal), or None while it runs."""
        code = self.process.poll()
        if code is not None and self.ended_at is None:
            self.ended_at = time.monotonic()
        return code

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)


class WorkerGroup:
    """The workers of one attempt; `watch` takes it from here. Leaving the context ends what is left of it."""

    def __init__(self, run_id: str, plan: Sequence[RankCpus]) -> None:
        self.run_id = run_id
        self._owned = OwnedFolder("paceline-workers-")
        self.folder = self._owned.path
        self.plan = list(plan)
        self.workers: list[Worker] = []
        self.started_at = time.monotonic()
        self.oom_kills = oom_kills()

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def live(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.poll() is None]

    def close(self) -> None:
        """Kill what still runs and remove the folder of verdicts and heartbeats."""
        for worker in self.live():
            worker.send(signal.SIGKILL)
        for worker in self.workers:
            worker.process.wait()
            if worker.process.stdout is not None:
                worker.process.stdout.close()
        self._owned.close()


def start(
    argv: Sequence[str],
    *,
    procs: int,
    run_id: str,
    module: str = "paceline",
    port: int | None = None,
    threads: int | None = None,
    pin: bool = True,
    cpus: Sequence[RankCpus] | None = None,
    env: Mapping[str, str] | None = None,
) -> WorkerGroup:
    """Start `python -m MODULE ARGV` once per local rank. Call it from the main thread: workers die with the caller.

    Args:
        procs: number of ranks; all of them on this host.
        run_id: only workers that carry it may join.
        port: where they meet; None for a free one.
        threads: CPU threads per rank; None for its share.
        pin: whether ranks get CPUs of their own where there are enough.
        cpus: a plan made before, instead of `threads` and `pin`.
        env: the environment, instead of this process's own.

    Raises:
        JobError: `procs` is below 1, the port is in use, or GLOO_SOCKET_IFNAME names no interface of this host.
    """
    if procs < 1:
        raise JobError(
            f"{procs} worker processes cannot train anything", key="launch.procs_per_node", hint="Start 1 or more."
        )
    base = dict(os.environ if env is None else env)
    check_interfaces(base, False, (GLOO,))
    plan = list(cpus) if cpus is not None else plan_here(procs, threads, pin)
    with ports.listen(port) as listener:
        group = WorkerGroup(run_id, plan)
        try:
            for rank in range(procs):
                variables = _variables(group, rank, procs, listener.getsockname()[1])
                if rank == 0:
                    variables[environment.LISTEN_FD] = str(listener.fileno())
                group.workers.append(_start_one(rank, module, argv, base, variables, plan[rank], listener.fileno()))
        except BaseException:
            group.close()
            raise
    return group


def plan_here(procs: int, threads: int | None = None, pin: bool = True, helpers: int = 0) -> list[RankCpus]:
    """The CPUs of `procs` ranks on this host, out of those that this process may use, near each rank's device.

    Args:
        helpers: processes beside each rank that CPUs are left for.
    """
    return affinity.plan_affinity(
        procs, affinity.allowed_cpus(), affinity.cpu_quota(), threads,
        pin=pin, order=affinity.core_order(), helpers=helpers, near=near.device_cpus(procs),
    )  # fmt: skip


def _start_one(
    rank: int,
    module: str,
    argv: Sequence[str],
    base: Mapping[str, str],
    variables: Mapping[str, str],
    plan: RankCpus,
    listen_fd: int,
) -> Worker:
    inherited = {k: v for k, v in base.items() if k not in environment.OWN and k not in environment.TORCHRUN}
    with _on_cpus(plan):
        process = subprocess.Popen(
            [sys.executable, "-m", "paceline.workers.boot", module, *argv],
            env={**inherited, **affinity.thread_environment(plan, base), **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[listen_fd] if rank == 0 else [],
            # A group of its own: Ctrl-C in the terminal reaches the supervisor only, which decides what follows.
            process_group=0,
        )
    return Worker(rank, process)


@contextlib.contextmanager
def _on_cpus(plan: RankCpus) -> Iterator[None]:
    """The child inherits the mask of the thread that starts it: in force before its first import."""
    before = affinity.allowed_cpus()
    if plan.pinned:
        affinity.apply(plan)
    try:
        yield
    finally:
        if plan.pinned:
            affinity.apply(RankCpus(before, 0, False))


def _variables(group: WorkerGroup, rank: int, procs: int, port: int) -> dict[str, str]:
    columns = shutil.get_terminal_size().columns if sys.stderr.isatty() and rank == 0 else 0
    values = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": procs,
        "LOCAL_WORLD_SIZE": procs,
        "GROUP_RANK": 0,
        "MASTER_ADDR": ports.LOOPBACK,
        "MASTER_PORT": port,
        environment.FOLDER: group.folder,
        environment.RUN_ID: group.run_id,
        environment.PARENT: os.getpid(),
        environment.CPUS: affinity.cpu_list(group.plan[rank].cpus),
        environment.TERMINAL: columns or "",
        # What a worker prints must be seen when it is printed: the pipe is no terminal.
        "PYTHONUNBUFFERED": 1,
    }
    return {name: str(value) for name, value in values.items()}

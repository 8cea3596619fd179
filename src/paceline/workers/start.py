"""Starts the local workers of a run as plain subprocesses with torchrun's environment.

Imports no torch: the launcher would pay its import before the workers pay theirs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from paceline.errors import JobError
from paceline.workers import affinity, environment, near, ports
from paceline.workers.affinity import RankCpus
from paceline.workers.interfaces import GLOO, check_interfaces
from paceline.workers.oom import oom_kills
from paceline.workers.owned_folder import OwnedFolder


class Place(NamedTuple):
    """Where the workers of this host stand among those of the run. On node 0 they meet, at its `address`."""

    node_rank: int = 0
    nodes: int = 1
    address: str = ports.LOOPBACK


ALONE = Place()


class Worker:
    """One rank of this host: its process and the pipe that carries what it prints."""

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

    def __init__(self, run_id: str, plan: Sequence[RankCpus], place: Place = ALONE, port: int = 0) -> None:
        self.run_id = run_id
        self.place, self.port = place, port
        self.world_size = place.nodes * len(plan)
        """Ranks of all hosts."""
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
    place: Place = ALONE,
    port: int | None = None,
    threads: int | None = None,
    pin: bool = True,
    cpus: Sequence[RankCpus] | None = None,
    env: Mapping[str, str] | None = None,
) -> WorkerGroup:
    """Start `python -m MODULE ARGV` once per local rank. Call it from the main thread: workers die with the caller.

    Args:
        procs: number of ranks on this host, and on each other one.
        run_id: only workers that carry it may join.
        place: this host's among those of the run; alone unless given.
        port: where they meet; None for a free one, which node 0 alone can choose.
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
    check_interfaces(base, place.nodes > 1, (GLOO,))
    plan = list(cpus) if cpus is not None else plan_here(procs, threads, pin)
    with _listening(place, port) as listener:
        met_at = port if listener is None else int(listener.getsockname()[1])
        assert met_at is not None, "node 0 says which port it has chosen"
        group = WorkerGroup(run_id, plan, place, met_at)
        try:
            for local_rank in range(procs):
                # The first rank of the run serves the store where all meet.
                fd = listener.fileno() if listener is not None and local_rank == 0 else None
                group.workers.append(_start_one(group, local_rank, module, argv, base, fd))
        except BaseException:
            group.close()
            raise
    return group


def _listening(place: Place, port: int | None) -> contextlib.AbstractContextManager[socket.socket | None]:
    if place.node_rank > 0:
        return contextlib.nullcontext()
    return ports.listen(port, "" if place.nodes > 1 else ports.LOOPBACK)


def plan_here(
    procs: int, threads: int | None = None, pin: bool = True, helpers: int = 0, avoided: Collection[int] = ()
) -> list[RankCpus]:
    """The CPUs of `procs` ranks on this host, out of those that this process may use, near each rank's device.

    Args:
        helpers: processes beside each rank that CPUs are left for.
        avoided: CPUs that are not used, as long as there are others.
    """
    allowed = affinity.allowed_cpus()
    kept = [cpu for cpu in allowed if cpu not in avoided] or list(allowed)
    plan = affinity.plan_affinity(
        procs, kept, affinity.cpu_quota(), threads,
        pin=pin, order=affinity.core_order(), helpers=helpers, near=near.device_cpus(procs),
    )  # fmt: skip
    # Ranks that share what is kept must be held to it too.
    return [one._replace(pinned=True) for one in plan] if len(kept) < len(allowed) else plan


def _start_one(
    group: WorkerGroup,
    local_rank: int,
    module: str,
    argv: Sequence[str],
    base: Mapping[str, str],
    listen_fd: int | None,
) -> Worker:
    plan, variables = group.plan[local_rank], _variables(group, local_rank)
    if listen_fd is not None:
        variables[environment.LISTEN_FD] = str(listen_fd)
    inherited = {k: v for k, v in base.items() if k not in environment.OWN and k not in environment.TORCHRUN}
    with _on_cpus(plan):
        process = subprocess.Popen(
            [sys.executable, "-m", "paceline.workers.boot", module, *argv],
            env={**inherited, **affinity.thread_environment(plan, base), **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[] if listen_fd is None else [listen_fd],
            # A group of its own: Ctrl-C in the terminal reaches the supervisor only, which decides what follows.
            process_group=0,
        )
    return Worker(int(variables["RANK"]), process)


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


def _variables(group: WorkerGroup, local_rank: int) -> dict[str, str]:
    procs = len(group.plan)
    rank = group.place.node_rank * procs + local_rank
    columns = shutil.get_terminal_size().columns if sys.stderr.isatty() and rank == 0 else 0
    values = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": group.world_size,
        "LOCAL_WORLD_SIZE": procs,
        "GROUP_RANK": group.place.node_rank,
        "MASTER_ADDR": group.place.address,
        "MASTER_PORT": group.port,
        environment.FOLDER: group.folder,
        environment.RUN_ID: group.run_id,
        environment.PARENT: os.getpid(),
        environment.CPUS: affinity.cpu_list(group.plan[local_rank].cpus),
        environment.TERMINAL: columns or "",
        # What a worker prints must be seen when it is printed: the pipe is no terminal.
        "PYTHONUNBUFFERED": 1,
    }
    return {name: str(value) for name, value in values.items()}

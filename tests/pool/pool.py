"""A pool of worker processes for tests of several ranks.

Importing torch costs seconds, so the processes are kept for the session and serve calls of any world size: a call on
four ranks uses the first four. Each call is a fresh default group; a process that crashed or hung is replaced.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.pool.messages import STACK_SIGNAL, Call, Outcome
from tests.pool.proc import exit_reason, process_state

ROOT = Path(__file__).resolve().parents[2]
MAX_RANKS = 8
START_TIMEOUT = 60.0
GRACE = 3.0
"""Seconds that the other ranks have to end by themselves once one has failed."""


class RankFailed(Exception):
    """A rank raised. `exception` is the first one in time, None where it has no pickle; `tracebacks` by rank."""

    def __init__(self, message: str, rank: int, exception: BaseException | None, tracebacks: dict[int, str]) -> None:
        super().__init__(message)
        self.rank = rank
        self.exception = exception
        self.tracebacks = tracebacks


class RankDied(Exception):
    """A worker process ended in the middle of a call."""

    def __init__(self, message: str, rank: int, returncode: int) -> None:
        super().__init__(message)
        self.rank = rank
        self.returncode = returncode


class RanksHung(Exception):
    """A call did not end in time. `stacks` has one text per rank."""

    def __init__(self, message: str, stacks: list[str]) -> None:
        super().__init__(message)
        self.stacks = stacks


class Worker:
    """One process of the pool."""

    def __init__(
        self, folder: Path, name: str, prefix: Sequence[str] = (), variables: Mapping[str, str] | None = None
    ) -> None:
        self.stacks_file = folder / f"{name}.stacks"
        self.log_file = folder / f"{name}.log"
        ours, theirs = socket.socketpair()
        with theirs, self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *prefix,
                    sys.executable,
                    "-m",
                    "tests.pool.child",
                    str(theirs.fileno()),
                    str(os.getpid()),
                    str(self.stacks_file),
                ],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "MKL_NUM_THREADS": "1",
                    "PYTHONPATH": _import_path(),
                    **(variables or {}),
                },
            )
        self.connection: Connection = Connection(ours.detach())
        self.log_start = 0

    def await_ready(self) -> None:
        if not self.connection.poll(START_TIMEOUT):
            raise RuntimeError(f"a pool worker did not start in {START_TIMEOUT:.0f} s\n{self.log()}")
        try:
            self.connection.recv()
        except (EOFError, OSError):
            raise RuntimeError(f"a pool worker died at its start ({self.ended()})\n{self.log()}") from None

    def begin(self, call: Call) -> None:
        self.log_start = self.log_file.stat().st_size
        self.connection.send(call)

    def log(self) -> str:
        """What this worker printed during the call, its last 4000 characters."""
        with self.log_file.open("rb") as file:
            file.seek(self.log_start)
            return file.read().decode(errors="replace")[-4000:]

    def ended(self) -> str:
        try:
            return exit_reason(self.process.wait(timeout=5))
        except subprocess.TimeoutExpired:
            return "closed its connection but is alive"

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.connection.close()


class Pool:
    """Runs a function on several ranks; see `run`.

    Args:
        prefixes: what stands before the command of each rank's process, so that it runs elsewhere; as many ranks at most.
        variables: of their environment.
    """

    def __init__(self, prefixes: Sequence[Sequence[str]] = (), variables: Mapping[str, str] | None = None) -> None:
        self._prefixes = [list(prefix) for prefix in prefixes]
        self._variables = dict(variables or {})
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-pool-")
        self._workers: list[Worker] = []
        self._calls = 0
        self._started = 0

    def run(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout: float = 30.0,
        env: Mapping[str, str] | None = None,
        group: bool = True,
    ) -> list[Any]:
        """`function(rank, world_size, *args)` on every rank, with a fresh default Gloo group; the results by rank.

        Args:
            function: defined at the top level of a module; it, its arguments and its results are pickled.
            timeout: seconds for the whole call; a collective has two thirds of it.
            env: variables for the call's duration.
            group: False leaves the making of the default group to the function.

        Raises:
            RankFailed: a rank raised; the first in time is named.
            RankDied: a process ended, by which signal or code.
            RanksHung: the time is over; holds every rank's stack.
        """
        if not 1 <= world_size <= MAX_RANKS:
            raise ValueError(f"world_size {world_size} is not in 1..{MAX_RANKS}")
        workers = self._take(world_size)
        deadline = time.monotonic() + timeout
        for rank, worker in enumerate(workers):
            worker.begin(self._call(function, args, rank, world_size, timeout, env)._replace(group=group))
        outcomes, dead = self._collect(workers, deadline)
        unfinished = [rank for rank in range(world_size) if rank not in outcomes and rank not in dead]
        failed = sorted((o.time, rank) for rank, o in outcomes.items() if not o.ok)
        if dead:
            rank = dead[0]
            reason, log = workers[rank].ended(), workers[rank].log()
            self._discard([workers[r] for r in (*dead, *unfinished)])
            self._release(workers)
            raise RankDied(f"rank {rank} of {world_size} {reason}\n{log}", rank, workers[rank].process.returncode)
        if failed:
            self._discard([workers[r] for r in unfinished])
            self._release(workers)
            raise _failure(failed, outcomes, workers, world_size)
        if unfinished:
            stacks = self.stacks(workers)
            self._discard(workers)
            raise RanksHung(_hang_text(timeout, unfinished, stacks), stacks)
        self._release(workers)
        return [pickle.loads(outcomes[rank].payload) for rank in range(world_size)]

    def stacks(self, workers: Sequence[Worker] | None = None) -> list[str]:
        """The Python stacks of each worker by rank, or its process state where it prints none."""
        workers = self._workers if workers is None else workers
        for worker in workers:
            worker.stacks_file.write_text("")
            if worker.process.poll() is None:
                worker.process.send_signal(STACK_SIGNAL)
        return [f"{_stack_of(worker)}{_indented(worker.log())}" for worker in workers]

    def close(self) -> None:
        self._discard(list(self._workers))
        self._folder.cleanup()

    def _take(self, world_size: int) -> list[Worker]:
        new = []
        while len(self._workers) < world_size:
            self._started += 1
            prefix = self._prefixes[len(self._workers)] if self._prefixes else ()
            new.append(Worker(Path(self._folder.name), f"worker-{self._started}", prefix, self._variables))
            self._workers.append(new[-1])
        try:
            for worker in new:
                worker.await_ready()
        except RuntimeError:
            # One that comes to life later would answer the next call with its greeting.
            self._discard(new)
            raise
        return self._workers[:world_size]

    def _call(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        rank: int,
        world_size: int,
        timeout: float,
        env: Mapping[str, str] | None,
    ) -> Call:
        if rank == 0:
            self._calls += 1
        if "<locals>" in function.__qualname__:
            raise ValueError(f"{function.__qualname__} is not at the top level of its module")
        return Call(
            module=function.__module__,
            file=function.__code__.co_filename,
            qualname=function.__qualname__,
            payload=pickle.dumps(args),
            rank=rank,
            world_size=world_size,
            store_file=str(Path(self._folder.name) / f"store-{self._calls}"),
            collective_timeout=timeout * 2 / 3,
            env=dict(env or {}),
            path=list(sys.path),
            group=True,
        )

    def _collect(self, workers: Sequence[Worker], deadline: float) -> tuple[dict[int, Outcome], list[int]]:
        """Outcomes by rank, dead ranks in order of death. After a first failure the others have `GRACE` seconds."""
        waiting = {worker.connection: rank for rank, worker in enumerate(workers)}
        outcomes: dict[int, Outcome] = {}
        dead: list[int] = []
        while waiting and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(waiting), timeout=left):
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    outcomes[rank] = connection.recv()
                except (EOFError, OSError):
                    dead.append(rank)
                if rank in dead or not outcomes[rank].ok:
                    deadline = min(deadline, time.monotonic() + GRACE)
        return outcomes, dead

    def _release(self, workers: Sequence[Worker]) -> None:
        """Let every rank leave its group, which none may do while another still reads from it."""
        live = [worker for worker in workers if worker in self._workers]
        for worker in live:
            worker.connection.send("release")
        for worker in live:
            try:
                clean = worker.connection.poll(GRACE) and worker.connection.recv() == "clean"
            except (EOFError, OSError):
                clean = False
            if not clean:
                self._discard([worker])

    def _discard(self, workers: Sequence[Worker]) -> None:
        if self._prefixes and workers:
            # Ranks belong to places: the next call starts all of them, each at its own.
            workers = list(self._workers)
        for worker in workers:
            worker.kill()
            if worker in self._workers:
                self._workers.remove(worker)


def _failure(
    failed: list[tuple[float, int]], outcomes: dict[int, Outcome], workers: Sequence[Worker], world_size: int
) -> RankFailed:
    rank = failed[0][1]
    tracebacks = {r: outcomes[r].traceback for _, r in failed}
    others = "".join(f"\nrank {r} later: {tracebacks[r].strip().splitlines()[-1]}" for _, r in failed[1:])
    log = workers[rank].log()
    text = f"rank {rank} of {world_size} raised\n{tracebacks[rank]}{others}" + (f"\nit printed:\n{log}" if log else "")
    payload = outcomes[rank].payload
    return RankFailed(text, rank, pickle.loads(payload) if payload else None, tracebacks)


def _hang_text(timeout: float, unfinished: list[int], stacks: list[str]) -> str:
    parts = [
        f"rank {rank}{'' if rank in unfinished else ' (had finished)'}:\n{text}" for rank, text in enumerate(stacks)
    ]
    return f"ranks {unfinished} did not finish in {timeout:.0f} s\n" + "\n".join(parts)


def _stack_of(worker: Worker) -> str:
    until = time.monotonic() + 2
    while time.monotonic() < until and process_state(worker.process.pid).startswith(("T", "gone")) is False:
        if (text := worker.stacks_file.read_text(errors="replace")) and text.rstrip().count("\n") > 0:
            time.sleep(0.05)
            return worker.stacks_file.read_text(errors="replace")
        time.sleep(0.02)
    return f"no stack; process state {process_state(worker.process.pid)}\n"


def _indented(log: str) -> str:
    return "it printed:\n" + "".join(f"  {line}\n" for line in log.splitlines()) if log else ""


def _import_path() -> str:
    return os.pathsep.join([str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])

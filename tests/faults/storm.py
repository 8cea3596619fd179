"""Kills inside a running command at moments drawn from a seed, and what there must not be afterwards.

It looks at the run from outside, as a machine that fails would: its processes in /proc, its steps and saves on disk.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.pool.launch import TOKEN, Running
from tests.pool.proc import carrying

from paceline.run.records import read_records

KINDS = {"rank": "paceline.workers.boot", "writer": "paceline.checkpoint.writer", "loader": "paceline.data.worker"}
STEPS_BETWEEN = 40
"""New steps after which a kill comes at the latest: so many are between two of them that the budget is renewed."""
LOOK_SECONDS = 0.002


class Kill(NamedTuple):
    """What was done: to which kind of process and which rank (-1 for others), after which step, and inside a save."""

    target: str
    rank: int
    step: int
    in_save: bool
    time: float


class Storm:
    """Kills processes of the run in `run_dir` that `running` trains.

    Args:
        seed: of all that is drawn.
        targets: kinds of processes, each as likely as it stands here often.
        share_in_saves: of the kills, those that wait for a save.
    """

    def __init__(
        self,
        running: Running,
        token: str,
        run_dir: Path,
        seed: int,
        targets: tuple[str, ...],
        share_in_saves: float = 0.5,
    ) -> None:
        self._running, self._token, self._run_dir = running, token, run_dir
        self._draw = random.Random(seed)
        self._targets = targets
        self._share_in_saves = share_in_saves
        self._records = _Tail(run_dir / "records")
        self.kills: list[Kill] = []

    def rage(self, count: int, timeout: float) -> list[Kill]:
        """Kill `count` times; returns what was done. The run goes on meanwhile."""
        deadline = time.monotonic() + timeout
        while len(self.kills) < count:
            assert self._running.process.poll() is None, f"ended after {self.kills}\n{self._running.stderr[-4000:]}"
            assert time.monotonic() < deadline, f"too slow; so far {self.kills}\n{self._running.stderr[-4000:]}"
            self._one_more(deadline)
        return self.kills

    def _one_more(self, deadline: float) -> None:
        target = self._draw.choice(self._targets)
        in_save = self._draw.random() < self._share_in_saves
        # From the last step that the killed attempt made: what is done again is no progress.
        since = max(self._records.steps, default=0) if self.kills else 0
        if not (self.kills and self._draw.random() < 0.1 and self.kills[-1].step != since):
            self._until(lambda: self._records.last() >= since + 1, deadline)
        self._until(lambda: self._records.last() >= since + self._draw.randrange(STEPS_BETWEEN), deadline)
        # Looked up before: a save is over sooner than /proc is read.
        pids = self._pids(target)
        if not pids:
            return
        rank = self._draw.choice(sorted(pids))
        if in_save:
            self._until(self._is_saving, deadline)
        else:
            time.sleep(self._draw.random() * 0.1)
        is_saving, step = self._is_saving(), self._records.last()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[rank], signal.SIGKILL)
            self.kills.append(Kill(target, rank if target == "rank" else -1, step, is_saving, time.time()))

    def _until(self, condition: Callable[[], bool], deadline: float) -> None:
        while not condition() and self._running.process.poll() is None and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)

    def _is_saving(self) -> bool:
        """Whether a folder of a step stands there that has not been committed yet."""
        folder = self._run_dir / "checkpoints"
        with contextlib.suppress(OSError):
            return any(not (path / "COMMIT").exists() for path in folder.glob("step-*"))
        return False

    def _pids(self, target: str) -> dict[int, int]:
        """Process ids by rank, or by number."""
        # The writer has a session of its own; all of them carry the token.
        found = carrying(TOKEN, self._token)
        chosen = sorted(pid for pid, command in found.items() if KINDS[target] in command)
        return {(_rank(pid) if target == "rank" else number): pid for number, pid in enumerate(chosen)}


class _Tail:
    """The steps that rank 0 has recorded, read as they come."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self.steps: set[int] = set()

    def last(self) -> int:
        """The furthest step that is on record."""
        for path in self._folder.glob("*rank0.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            for line in whole.splitlines():
                if line.startswith(b'{"kind":"step"'):
                    self.steps.add(int(line.partition(b'"step":')[2].partition(b",")[0]))
        return max(self.steps, default=0)


def _rank(pid: int) -> int:
    for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
        if entry.startswith(b"RANK="):
            return int(entry[5:])
    return -1


def shared_memory() -> set[str]:
    """Names in /dev/shm."""
    return {entry.name for entry in os.scandir("/dev/shm")}


def redone_beyond_a_save(run_dir: Path) -> list[str]:
    """Attempts that began before the newest checkpoint that was durable when the one before them ended."""
    durable, wrong = 0, []
    for record in read_records(run_dir, kinds=("checkpoint", "run_started")):
        if record["kind"] == "run_started" and record["step"] < durable:
            wrong.append(f"attempt {record['attempt']} began at {record['step']}, a save of {durable} was durable")
        elif record["kind"] == "checkpoint" and record["state"] == "durable":
            durable = max(durable, int(record["step"]))
    return wrong

"""One trial after the other: a run of the job with a fault in it, and what it came to."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from paceline.checkpoint.folders import step_folder
from paceline.drill import damage, reach
from paceline.drill.evidence import gather
from paceline.drill.faults import Control, Fault
from paceline.drill.judge import Place, ending, likeness, tolerance_of
from paceline.drill.order import EVERY_RANK, VARIABLE, Order
from paceline.drill.result import Trial
from paceline.errors import PacelineError
from paceline.rehearsal.trial import Ended, copy_run, run_once, run_until_killed
from paceline.rehearsal.variant import Variant
from paceline.workers.environment import BEFORE
from paceline.workers.processes import carrying, end

STEPS, EVERY, LOG_EVERY = 24, 6, 4
"""Steps of each run, between two saves, and of a window of times."""

FIRST_STEP, LAST_STEP = 8, 11
"""A fault strikes in a step between these: one save is behind it, one comes before the end and one after that."""

PACE_SECONDS = 0.05
"""Shortest step of the run that is killed whole: a quicker one would be at its end before the kill reaches it."""

KILL_TRIES = 3
INJECTOR = "paceline.drill.inject"
GONE_SECONDS = 5.0
"""Longest that the processes of a command are there after it: the checkpoint writer ends what it has begun."""

DISK_SAVES = 8
SMALL_DISK_BYTES = 64 * 2**20


class Ground(msgspec.Struct, kw_only=True):
    """What all trials of a drill stand on. Seconds are those of the undisturbed run."""

    folder: Path
    own: Variant
    other: Variant | None
    seed: int
    run_seconds: float = 0.0
    step_seconds: float = 0.0
    save_seconds: float = 0.0
    checkpoint_bytes: int = 0

    @property
    def undisturbed(self) -> Place:
        """The run without a fault."""
        run_dir = self.folder / "undisturbed"
        return Place(run_dir, str(run_dir / "checkpoints"))

    def limit_seconds(self, fault: Fault, control: Control | None) -> float:
        """After which a command is ended; that of a control is expected to stand still."""
        if control is not None:
            return 20.0 + 2.5 * self.run_seconds
        return 90.0 + (6.0 if fault.ends == "no progress" else 3.0) * self.run_seconds


def try_fault(ground: Ground, fault: Fault, control: Control | None = None, name: str | None = None) -> Trial:
    """Run the job with a fault, with a protection off where a control asks for that.

    Args:
        name: of the run, with which its rank, step and moment are drawn; the kind of the fault unless given.
    """
    began = time.monotonic()
    name = name or (f"without-{control.without}" if control else fault.kind)
    order = _order(ground, fault, name, control)
    with _prepared(ground, fault, name) as place:
        order = dataclasses.replace(order, place=place)
        run = _Run(ground, fault, name, order, control)
        how = run.go()
        trial = run.judged(how)
    return msgspec.structs.replace(trial, seconds=time.monotonic() - began)


def _order(ground: Ground, fault: Fault, name: str, control: Control | None) -> Order:
    drawn = random.Random(f"{ground.seed} {name}")
    seconds = {
        "kill": ground.step_seconds, "kill-in-save": ground.save_seconds, "slow-rank": 1.5 * ground.step_seconds,
        "slow-data": 1.5 * ground.step_seconds,
    }.get(fault.kind, 0.0)  # fmt: skip
    return Order(
        kind=fault.kind, rank=drawn.randrange(ground.own.procs), step=drawn.randint(FIRST_STEP, LAST_STEP),
        truth=str(ground.folder / f"{name}.truth.jsonl"), seed=drawn.randrange(2**31), seconds=seconds,
        without=control.without if control else "",
    )  # fmt: skip


@contextlib.contextmanager
def _prepared(ground: Ground, fault: Fault, name: str) -> Iterator[str]:
    """What a fault needs beside the processes: gives the place that its order names."""
    if fault.kind == "slow-cpu":
        with reach.little_cpu(f"paceline-drill-{os.getpid()}-{name}") as members:
            yield members
    elif fault.kind == "full-disk":
        size = SMALL_DISK_BYTES + DISK_SAVES * ground.checkpoint_bytes
        with reach.small_disk(ground.folder / f"{name}-disk", size) as disk:
            yield disk
    else:
        yield reach.LINK if fault.kind == "slow-link" else ""


class _Run:
    """The commands of one trial."""

    def __init__(self, ground: Ground, fault: Fault, name: str, order: Order, control: Control | None) -> None:
        self._ground, self._fault, self._order, self._control = ground, fault, order, control
        self._dir = ground.folder / name
        self._words = list(ground.own.words)
        self._checkpoints = str(self._dir / "checkpoints")
        if fault.kind == "full-disk":
            self._checkpoints = str(ground.folder / f"{name}-disk" / "checkpoints")
            self._words.append(f"checkpoint.dir={self._checkpoints}")
        self._temporary = ground.folder / f"{name}.tmp"
        self._temporary.mkdir()
        self._ends: list[Ended] = []

    def go(self) -> str:
        """Run, and say what was done to it."""
        if self._fault.strikes == "checkpoint":
            return self._damaged()
        if self._fault.strikes == "ranks":
            return self._elsewhere()
        self._command()
        if self._fault.ends == "preempted" and self._ends[0].code == 75:
            self._command(part="-again")
        return self._told()

    def judged(self, how: str) -> Trial:
        """What the records, the files and the processes that are left say."""
        fault, ground = self._fault, self._ground
        left = self._left_behind()
        truth = self._order.done()
        seen = gather(self._dir, fault, truth)
        struck = truth[0] if truth else {}
        why = [] if truth else ["the fault did not strike"]
        why += ending(fault, self._ends, seen, self._dir, STEPS)
        actual = Place(self._dir, self._checkpoints)
        step = STEPS
        if fault.ends in ("no progress", "bad step"):
            # Which steps are saved is a matter of time: what comes due during a save is made after it.
            both = {s for s in ground.undisturbed.saved() if s < struck.get("step", STEPS)} & set(actual.saved())
            step = max(both, default=0)
        is_elsewhere = fault.strikes == "ranks"
        alike = likeness(
            ground.undisturbed, actual, step or None, tolerance_of(ground.own.precision) if is_elsewhere else None
        )
        why += alike.why
        if fault.ends == "preempted" and seen.steps_redone:
            why.append(f"{seen.steps_redone} steps were lost, though there was time for a save")
        if not seen.within:
            why.append(f"{seen.steps_redone} steps were lost, more than since the last durable checkpoint")
        if fault.strikes == "writer" and not seen.failed_saves:
            why.append("no failed save is on record")
        if fault.alive and seen.attempts > 1:
            why.append(f"{seen.attempts} attempts, though it could go on")
        if self._is_unseen(seen.named):
            why.append("no straggler is on record")
        return Trial(
            kind=fault.kind, survived=not why and not left, detect_seconds=seen.detect_seconds,
            recover_seconds=seen.recover_seconds, steps_redone=seen.steps_redone, equal=alike.equal,
            exits=tuple(e.code for e in self._ends), attempts=seen.attempts, largest_difference=alike.largest,
            struck_rank=struck.get("rank"), struck_step=struck.get("step"), named_rank=seen.named_rank,
            named=seen.named, why=(*why, *left), how=how, without=self._order.without, run_dir=str(self._dir),
        )  # fmt: skip

    def _is_unseen(self, named: str | None) -> bool:
        return self._fault.kind in ("slow-rank", "slow-cpu", "slow-data") and named is None

    def _command(self, part: str = "", words: Sequence[str] | None = None) -> None:
        limit = self._ground.limit_seconds(self._fault, self._control)
        needs_own = self._fault.kind == "slow-link" or self._order.without
        self._ends.append(
            run_once(
                self._dir, self._words if words is None else words, part=part, limit_seconds=limit, env=self._variables(),
                module="paceline.drill.command" if needs_own else "paceline",
            )
        )  # fmt: skip

    def _variables(self) -> dict[str, str]:
        return {
            **self._order.environment(), BEFORE: INJECTOR, "TMPDIR": str(self._temporary),
        }  # fmt: skip

    def _damaged(self) -> str:
        source, newest = killed_run(self._ground)
        copy_run(source, self._dir, newest)
        folder = Path(self._checkpoints) / step_folder(newest)
        do: Callable[[], dict[str, object]] = (
            (lambda: damage.flip_bit(folder, self._order.seed))
            if self._fault.kind == "corrupted-checkpoint"
            else (lambda: damage.cut_off(folder))
        )
        done = do()
        self._order.note(rank=None, step=newest, **done)
        self._command()
        return f"{self._fault.does}: {done}"

    def _elsewhere(self) -> str:
        other = self._ground.other
        assert other is not None, "a fault that cannot be tried is left out before"
        source, newest = killed_run(self._ground)
        copy_run(source, self._dir, newest)
        self._order.note(rank=None, step=newest, procs=other.procs)
        self._command(words=other.words)
        return f"{self._fault.does}: from {self._ground.own.procs} to {other.procs}"

    def _told(self) -> str:
        order = self._order
        place = f" ({'a tmpfs of limited size' if order.place else 'told by the storage layer'})"
        return f"{self._fault.does}: rank {order.rank}, from step {order.step}" + (
            place if self._fault.kind == "full-disk" else ""
        )

    def _left_behind(self) -> list[str]:
        """Processes and temporary folders of the trial; the former are ended."""
        token = f"{VARIABLE}=".encode(), self._order.truth.encode()
        deadline = time.monotonic() + GONE_SECONDS
        while (pids := carrying(*token)) and time.monotonic() < deadline:
            time.sleep(0.05)
        end(pids)
        found = sorted(path.name for path in self._temporary.iterdir() if path.name.startswith("paceline"))
        shutil.rmtree(self._temporary, ignore_errors=True)
        return [*([f"processes {pids} were left behind"] if pids else []), *([f"{found} left behind"] if found else [])]


def killed_run(ground: Ground) -> tuple[Path, int]:
    """A run that was killed whole once it had two checkpoints, and the newest one; made when it is first asked for."""
    run = Place(ground.folder / "killed", str(ground.folder / "killed" / "checkpoints"))
    slow = Order(
        kind="pace", rank=EVERY_RANK, step=1, truth=str(ground.folder / "killed.truth.jsonl"), seconds=PACE_SECONDS
    )
    env = {**slow.environment(), BEFORE: INJECTOR}
    for _ in range(KILL_TRIES):
        # On a busy host a moment can be long: a run that came to its end before the kill is made again.
        if run.run_dir.exists() or run_until_killed(
            run.run_dir, ground.own.words, lambda: len(run.saved()) >= 2, env=env
        ):
            return run.run_dir, run.saved()[-1]
        shutil.rmtree(run.run_dir)
    raise PacelineError(
        f"the run came to its end {KILL_TRIES} times before it could be killed after its second save",
        values={"tries": KILL_TRIES},
    )

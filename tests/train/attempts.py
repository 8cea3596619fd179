"""Attempts of a real run inside the pool's ranks: the worker's own path, without the seconds of a command's start."""

from __future__ import annotations

import contextlib
import functools
import io
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from paceline.checkpoint.places import find_one
from paceline.checkpoint.saver import Saver
from paceline.cluster.probe import Host
from paceline.errors import Preempted
from paceline.job.load import load_job
from paceline.job.resolve import Resolved, resolve_job
from paceline.run.directory import RunDirectory
from paceline.run.records import latest_steps, read_records
from paceline.train import begin_and_end, keeping, loop, shared_run, startup, worker
from paceline.train.keep import Keeper
from paceline.train.session import Session
from paceline.train.step import StepResult
from paceline.workers import stop as stop_signals
from paceline.workers.rendezvous import World
from tests.cli.job import SMALL, TEXT

HOST = Host("test", "cpu", 0, "cpu", 2**34, 4, 2**34, True, None)
STEPS = 8
WORDS = (
    *SMALL, "batch.global_batch=12", "data.eval_sequences=7", f"run.steps={STEPS}", "run.record_samples=true",
    "parallel.precision=fp32", "parallel.compile=false", "model.dropout=0.1", "data.workers=0", "checkpoint.every=end",
)  # fmt: skip


class Killed(BaseException):
    """What ends a killed attempt: nothing but the unwinding of its stack sees it."""


def attempt(
    rank: int,
    world_size: int,
    folder: Path,
    words: Sequence[str],
    stop: int | None = None,
    *,
    kill: int | None = None,
    asked: Mapping[int, int] = {},
    each: bool = False,
    writer: Sequence[str] = (),
    text: str = TEXT,
) -> str:
    """One attempt of the run in `folder`; returns what this rank said.

    Args:
        stop: it ends after this step as if it had been told to, with a save.
        kill: it ends right after this step as if all ranks had been killed: nothing is waited for, nothing is said.
        asked: steps in which ranks hear a signal, by rank.
        each: each save is waited for, so that none is due while another is in flight.
        writer: the command of the checkpoint writer.
        text: what is trained on.
    """
    with (
        contextlib.chdir(folder), _stopped_at(stop), _killed_after(kill), _asked_in(asked.get(rank)), _in_a_hurry(),
        writing_by(writer),
        _waiting_for(each), _listening(folder / f"said-by-{rank}") as said,
    ):  # fmt: skip
        if rank == 0 and not Path("text.txt").exists():
            Path("text.txt").write_text(text)
        world = world_of(rank, world_size)
        resolved = resolved_job(words, world_size)
        with open_run(resolved, world) as directory, contextlib.suppress(Killed):
            if directory.finished is None:
                try:
                    worker._attempt(resolved, world, directory, time.time())
                except Preempted as error:
                    print(f"exit {error.exit_code}: {error}", file=sys.stderr)
    return said.getvalue()


def attempts(
    rank: int, world_size: int, folder: Path, calls: Sequence[tuple[Sequence[str], Mapping[str, Any]]]
) -> list[str]:
    """Several attempts, one after another, in one call of the pool: words, and the other arguments of `attempt`."""
    return [attempt(rank, world_size, folder, words, **options) for words, options in calls]


def resolved_job(words: Sequence[str], world_size: int) -> Resolved:
    return resolve_job(load_job(None, [*WORDS, *words]), world_size, HOST)


def open_run(resolved: Resolved, world: World) -> RunDirectory:
    return shared_run._shared(lambda: shared_run.open_run(resolved), resolved.job.run_path, world)


def world_of(rank: int, world_size: int) -> World:
    """The pool's ranks as one host; the store serves several attempts of one call."""
    store = dist.PrefixStore(f"attempt-{next(_count)}", dist.distributed_c10d._get_default_store())
    return World(rank, rank, world_size, world_size, torch.device("cpu"), store)


class _Count:
    """Calls since this process group was made, which all ranks count alike."""

    def __init__(self) -> None:
        self._of: object = None
        self._calls = 0

    def __next__(self) -> int:
        if dist.group.WORLD is not self._of:
            self._of, self._calls = dist.group.WORLD, 0
        self._calls += 1
        return self._calls


_count = _Count()


@contextlib.contextmanager
def _stopped_at(stop: int | None) -> Iterator[None]:
    """The learning rate still follows the whole run, and no record says that the run is done."""
    if stop is None:
        yield
        return
    whole = loop.train

    def train(session: Session, *rest: Any) -> loop.Outcome:
        session.steps = stop
        return whole(session, *rest)

    with mock.patch.object(loop, "train", train), mock.patch.object(worker, "finish"):
        yield


@contextlib.contextmanager
def _asked_in(step: int | None) -> Iterator[None]:
    """From this step on (the first is 1) the rank has heard a signal, as late as it may come to be told in that step."""
    if step is None:
        yield
        return
    votes, heard = Keeper.votes, [False]

    def votes_then(keeper: Keeper, number: int) -> tuple[float, ...]:
        heard[0] = number + 1 >= step
        return votes(keeper, number)

    def asked() -> stop_signals.Ask | None:
        return stop_signals.Ask("SIGTERM", time.monotonic()) if heard[0] else None

    with mock.patch.object(Keeper, "votes", votes_then), mock.patch.object(stop_signals, "asked", asked):
        yield


@contextlib.contextmanager
def _killed_after(kill: int | None) -> Iterator[None]:
    """The ranks drop their connections to the writer, as the kernel does for a dead process."""
    if kill is None:
        yield
        return
    wants, save = Keeper.wants, Keeper.save

    def wants_or_dies(keeper: Keeper, step: int, result: StepResult, *rest: Any) -> bool:
        wanted = wants(keeper, step, result, *rest)
        if step == kill and not wanted:
            raise Killed
        return wanted

    def save_and_die(keeper: Keeper, step: int, evals: Mapping[str, float] | None) -> None:
        save(keeper, step, evals)
        if step == kill:
            raise Killed

    def close(keeper: Keeper) -> None:
        keeper._saver._host.close(0.0)

    with (
        mock.patch.object(Keeper, "wants", wants_or_dies),
        mock.patch.object(Keeper, "save", save_and_die),
        mock.patch.object(Keeper, "close", close),
    ):
        yield


@contextlib.contextmanager
def _waiting_for(each: bool) -> Iterator[None]:
    save = Keeper.save

    def save_and_wait(keeper: Keeper, step: int, evals: Mapping[str, float] | None) -> None:
        save(keeper, step, evals)
        keeper._wait(step)

    with mock.patch.object(Keeper, "save", save_and_wait) if each else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def writing_by(command: Sequence[str]) -> Iterator[None]:
    if not command:
        yield
        return
    with mock.patch.object(keeping, "Saver", functools.partial(Saver, command=command)):
        yield


@contextlib.contextmanager
def _listening(file: Path) -> Iterator[io.StringIO]:
    """What is said also goes into `file`, where it is found after a failure, and to the one who reads why a test failed."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            yield said
    finally:
        file.write_text(said.getvalue())
        print(said.getvalue(), file=sys.stderr, flush=True)


@contextlib.contextmanager
def _in_a_hurry() -> Iterator[None]:
    """Without what takes a second and changes nothing: the matmul peak, the sample of text and the bigram model."""
    with (
        mock.patch.object(startup, "measured_peak", return_value=1e9),
        mock.patch.object(worker, "sample_text", return_value=""),
        mock.patch.object(begin_and_end, "bigram_loss", return_value=0.0),
    ):
        yield


class Left(NamedTuple):
    """What a run left: by step its loss and norm and sample numbers; checksums of all pieces; verdicts of resumes."""

    curve: dict[int, tuple[float, float]]
    samples: dict[int, list[int]]
    tensors: dict[str, list[str]]
    state: dict[str, object]
    verdicts: list[str]


def left(run: Path) -> Left:
    """What is there to compare. Steps that a later attempt did again are void."""
    records = list(read_records(run, kinds=("run_started", "step", "samples", "certificate")))
    steps = latest_steps(records)
    assert [r["step"] for r in steps] == list(range(1, len(steps) + 1)), "a step is missing or stands twice"
    samples = {r["step"]: r["ids"] for r in records if r["kind"] == "samples"}
    manifest = find_one(str(run)).manifest()
    tensors = {name: [p.checksum for p in t.pieces] for name, t in manifest.tensors.items()}
    return Left(
        {r["step"]: (r["loss"], r["grad_norm"]) for r in steps}, samples, tensors,
        {**manifest.state, "ranks": manifest.ranks}, [r["verdict"] for r in records if r["kind"] == "certificate"],
    )  # fmt: skip


def said(run: Path, *kinds: str) -> list[dict[str, Any]]:
    """The records of some kinds."""
    return list(read_records(run, kinds=kinds))

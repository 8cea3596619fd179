"""One run directory for all ranks: opened once, by the supervisor or by rank 0, and agreed on before anything else."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import tomlkit

from paceline.checkpoint import grace
from paceline.errors import JobError, PacelineError, from_record
from paceline.job.load import LENGTHS, Job
from paceline.job.resolve import Resolved
from paceline.job.write import resolved_toml, resolved_values
from paceline.run.control import Control
from paceline.run.directory import RunDirectory, next_free_name

if TYPE_CHECKING:
    from paceline.run.records import Record
    from paceline.workers.rendezvous import World

RUN_PATH = "PACELINE_RUN_PATH"
ATTEMPT = "PACELINE_ATTEMPT"
LAUNCHED = "PACELINE_LAUNCHED"

_MAY_CHANGE_SECTIONS = ("telemetry", "recovery", "launch", "checkpoint")
_MAY_CHANGE_KEYS = (
    *LENGTHS,
    *("run.log_every", "run.eval_every", "run.record_samples", "run.dir", "run.name"),
    *("parallel.dp_replicate", "parallel.dp_shard", "parallel.cp", "parallel.tp", "parallel.pp"),
    *("parallel.layout", "parallel.recompute"),
    *("parallel.zero_stage", "parallel.reduce_every"),
    *("parallel.bucket_bytes", "parallel.overlap", "parallel.reduce_dtype", "parallel.compile"),
    # Derived anew from the layout and the place; the global batch is what stays.
    *("batch.microbatch", "parallel.loss_chunk_tokens", "parallel.offload_dir"),
    *("parallel.ranks", "parallel.sequence_parallel", "parallel.cp_method"),
    *("parallel.pp_schedule", "parallel.pp_stages_per_rank", "parallel.pp_layers"),
)


def may_change(job: Job, key: str) -> bool:
    """Whether a resumed run may have another value: length, logging, telemetry, launch, layout, and what is allowed."""
    return _may_change(key) or key in job.checkpoint.allow_change


def _may_change(key: str) -> bool:
    # Another place for checkpoints would be an empty one, and the run would begin anew without a word.
    return (key.split(".")[0] in _MAY_CHANGE_SECTIONS and key != "checkpoint.dir") or key in _MAY_CHANGE_KEYS


def open_run(resolved: Resolved, again: Path | None = None) -> RunDirectory:
    """The job's run directory, held by this process.

    Args:
        again: the directory that the command has had before, where another host held it for all.

    Raises:
        RunHeld, JobError, DiskFull: see `RunDirectory.open`.
        JobError: a save, as measured in it before, does not fit into the time that a stop signal leaves.
    """
    job = resolved.job
    path = again or job.run_path
    if job.checkpoint.resume == "never":
        path = again or path.with_name(next_free_name(path.parent, path.name))
        run = msgspec.structs.replace(job.run, name=path.name)
        resolved = msgspec.structs.replace(resolved, job=msgspec.structs.replace(job, run=run))
    directory = RunDirectory.open(
        path, resolved_toml(resolved), resolved_values(resolved), lambda key: may_change(job, key)
    )
    with _kept(directory):
        directory.notes += grace.check(grace.measured_in(directory.path), float(job.recovery.grace), os.environ)
        return _recorded(directory)


@contextlib.contextmanager
def _kept(directory: RunDirectory) -> Iterator[None]:
    """What is refused in here gives the directory back."""
    try:
        yield
    except PacelineError:
        directory.release()
        raise


def _recorded(directory: RunDirectory) -> RunDirectory:
    """The directory, once what is not as in the attempts before has been written down and old requests are void."""
    if directory.finished is None:
        directory.notes += Control(directory.path).clear()
    if directory.changes:
        with directory.writer("changes") as writer:
            for change in directory.changes:
                writer.write(change)
    return directory


def write_at_once(directory: RunDirectory, record: Record) -> None:
    """Write down what happens before the records of the attempt begin."""
    with directory.writer("start") as writer:
        writer.write(record)


def worker_environment(directory: RunDirectory, launched: float) -> dict[str, str]:
    """What tells a worker which directory its supervisor holds."""
    return {RUN_PATH: str(directory.path.resolve()), ATTEMPT: str(directory.attempt), LAUNCHED: f"{launched:.6f}"}


def launched_at(otherwise: float) -> float:
    """When the command was given, in seconds since the epoch."""
    return float(os.environ.get(LAUNCHED, otherwise))


def join_run(resolved: Resolved, world: World) -> RunDirectory:
    """The run directory as every rank sees it: the supervisor's, or (under torchrun) the one that rank 0 opens.

    Raises:
        PacelineError: what opening it raised, on every rank alike.
    """
    if RUN_PATH in os.environ:
        return RunDirectory.attach(Path(os.environ[RUN_PATH]), int(os.environ[ATTEMPT]))
    return _shared(lambda: open_run(resolved), resolved.job.run_path, world)


def open_directory(path: Path, values: dict[str, Any], world: World) -> RunDirectory:
    """The run directory of a `Trainer`, opened by rank 0 for all ranks.

    Raises:
        PacelineError: what opening it raised, on every rank alike.
    """
    table = tomlkit.dumps({key: str(value) for key, value in values.items()})

    def open_it() -> RunDirectory:
        directory = RunDirectory.open(path, table, values, _may_change)
        with _kept(directory):
            return _recorded(directory)

    return _shared(open_it, path, world)


def _shared(open_it: Callable[[], RunDirectory], path: Path, world: World) -> RunDirectory:
    """What rank 0 opens, on all ranks; nothing is opened where one of them was told of another path."""
    _agree_on_path(path, world)
    key = world.shared_key("run-directory")
    directory, error = _open_for_all(open_it, world, key) if world.rank == 0 else _attached(world, key)
    try:
        _raise_first(error, world)
    except PacelineError:
        if directory is not None:
            directory.release()
        raise
    assert directory is not None
    return directory


def _open_for_all(
    open_it: Callable[[], RunDirectory], world: World, key: str
) -> tuple[RunDirectory | None, PacelineError | None]:
    try:
        directory = open_it()
    except PacelineError as error:
        world.store.set(key, json.dumps(None))
        return None, error
    told = {"path": str(directory.path.resolve()), "attempt": directory.attempt, "finished": directory.finished}
    world.store.set(key, json.dumps(told, default=str))
    return directory, None


def _attached(world: World, key: str) -> tuple[RunDirectory | None, PacelineError | None]:
    told: dict[str, Any] | None = json.loads(world.store.get(key))
    if told is None:
        return None, None
    try:
        directory = RunDirectory.attach(Path(told["path"]), int(told["attempt"]))
    except PacelineError:
        return None, not_shared(f"rank {world.rank}", told["path"], "rank 0")
    directory.finished = told["finished"]
    return directory, None


def not_shared(who: str, path: str, holder: str) -> PacelineError:
    """The error where `who`, on this host, does not see what `holder` opened."""
    return JobError(
        f"{who} (on {os.uname().nodename}) does not see the run directory {path} that {holder} opened",
        key="run.dir",
        values={"who": who, "directory": path},
        hint="Put run.dir on a file system that all hosts share.",
    )


def _agree_on_path(path: Path, world: World) -> None:
    """Paths are compared as this rank would open them: a name that holds a time or a rank differs."""
    own = str(path.resolve())
    key = world.shared_key("run-path")
    if world.rank == 0:
        world.store.set(key, own)
    rank0 = world.store.get(key).decode()
    error = None
    if own != rank0:
        error = JobError(
            f"the ranks were told of different run directories: rank 0 of {rank0}, rank {world.rank} of {own}",
            key="run.dir",
            values={"rank": world.rank, "directory": own, "rank0": rank0},
            hint="Give all ranks the same run.dir and run.name, without a time, a process id or a rank in them.",
        )
    _raise_first(error, world)


def _raise_first(error: PacelineError | None, world: World) -> None:
    """Raise the error of the lowest rank that has one, on all ranks: before the process group there is only the store."""
    key = world.shared_key("run-errors")
    world.store.set(f"{key}/{world.rank}", json.dumps(error and error.to_record(), default=str))
    if world.rank == 0:
        everyone = [json.loads(world.store.get(f"{key}/{rank}")) for rank in range(world.world_size)]
        world.store.set(f"{key}/first", json.dumps(next((e for e in everyone if e), None)))
    first = json.loads(world.store.get(f"{key}/first"))
    if first is not None:
        # Rank 0 may host the store, and its end would keep the reason from the others.
        world.host_barrier(f"{key}/heard", timeout=30.0)
        raise error if error is not None and error.to_record() == first else from_record(first)

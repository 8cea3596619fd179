"""One rank of `paceline train`: join, prepare, train, save. Started by `train.run`, or by torchrun."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import msgspec

from paceline.cluster.probe import probe_host
from paceline.data.config import HELD_OUT
from paceline.data.prepare import PreparedData, prepare
from paceline.data.tokenizer import FileTokenizer
from paceline.job.load import Job
from paceline.job.resolve import Resolved, resolve_job, with_samples
from paceline.model.init import hash_in_order
from paceline.model.spec import parameter_count
from paceline.parallel.collectives import gather_objects
from paceline.parallel.compile.apply import recompiles
from paceline.run.directory import RunDirectory
from paceline.run.files import write_atomic
from paceline.train import loop, shared_run
from paceline.train.begin_and_end import end_early, finish, peak_memory_bytes, sample_text, started_record
from paceline.train.continue_text import TOKENIZER_FILE
from paceline.train.keep import Keeper
from paceline.train.keeping import check_model, make_keeper, make_room, tell_start
from paceline.train.observe import RunObserver
from paceline.train.out_of_memory import explain_out_of_memory
from paceline.train.requests import leave_the_start
from paceline.train.resume import Start, resume
from paceline.train.session import Session
from paceline.train.startup import build_session, world_group
from paceline.train.state import TrainingState
from paceline.train.stragglers import stragglers_watched
from paceline.workers import stop
from paceline.workers.environment import is_supervised
from paceline.workers.heartbeat import beat
from paceline.workers.rendezvous import World, join, leave
from paceline.workers.verdict import reported

Plan = Callable[[Resolved], dict[str, Any]]
MAX_HASHED_PARAMETERS = 2_000_000_000
"""The hash of the initial weights reads all of them on one rank: about half a second per billion bytes."""


def run_worker(job: Job, plan: Plan, report: Callable[[Path], object]) -> int:
    """Train on this rank; returns the exit code. An error becomes the worker's verdict.

    Args:
        job: the parsed job.
        plan: what is predicted for a resolved job, written where no supervisor has done so.
        report: writes the run's report, likewise.
    """
    return reported(lambda: _run(job, plan, report))


def _run(job: Job, plan: Plan, report: Callable[[Path], object]) -> int:
    started = time.time()
    stop.listen(leave_the_start)
    world = join(job.recovery.collective_seconds, start_timeout=float(job.recovery.start_timeout))
    try:
        resolved = resolve_job(job, world.world_size, probe_host(), ranks_per_host=world.local_world_size)
        directory = shared_run.join_run(resolved, world)
        if directory.finished is not None:
            return 0
        resolved = _offloading_into(directory.path, resolved)
        alone = world.rank == 0 and not is_supervised()
        with directory:
            if alone:
                print(*directory.notes, sep="\n", end="\n" if directory.notes else "", file=sys.stderr, flush=True)
                write_atomic(directory.plan_file, json.dumps(plan(resolved), indent=1))
            # Without a supervisor beside it, rank 0 looks for slow ranks itself.
            policy = job.recovery.on_straggler
            with stragglers_watched(directory, resolved.layout, _say, policy) if alone else nullcontext():
                _attempt(resolved, world, directory, started)
        if alone:
            report(directory.path)
        return 0
    finally:
        leave(world)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _offloading_into(folder: Path, resolved: Resolved) -> Resolved:
    """Moments that go to the disk go into the run's own directory, which is known only now, unless the job names another."""
    offload = resolved.transforms.offload
    if offload.place != "disk" or resolved.job.parallel.offload_dir is not None:
        return resolved
    transforms = msgspec.structs.replace(resolved.transforms, offload=msgspec.structs.replace(offload, folder=folder))
    return msgspec.structs.replace(resolved, transforms=transforms)


def _attempt(resolved: Resolved, world: World, directory: RunDirectory, started: float) -> None:
    beat(-1, "preparing data", allow_seconds=24 * 3600.0)
    data = prepare(resolved.job.data)
    resolved = with_samples(resolved, len(data.train))
    beat(-1, "building the model")
    with explain_out_of_memory(resolved):
        session = build_session(resolved, data, world, lambda state: _begin(state, resolved, data, world, directory))
        try:
            _train(resolved, data, world, directory, session, started)
        finally:
            session.batches.close()


def _begin(
    state: TrainingState, resolved: Resolved, data: PreparedData, world: World, directory: RunDirectory
) -> Start:
    """Fill the state from the checkpoint that the attempt begins with, if there is one."""
    section = resolved.job.checkpoint
    place = section.place(directory.path)
    return resume(
        state, world, world_group(world), section, place,
        prepare=lambda: make_room(section, place, state, world.world_size),
        check=lambda manifest: check_model(manifest, resolved, data, own=manifest.run_id == directory.run_id),
        record=lambda record: shared_run.write_at_once(directory, record),
    )  # fmt: skip


def _train(
    resolved: Resolved, data: PreparedData, world: World, directory: RunDirectory, session: Session, started: float
) -> None:
    job = resolved.job
    policy = loop.Policy(
        log_every=job.run.log_every, eval_every=job.run.eval_every,
        stop_on_bad_step=job.optimizer.bad_step == "stop", max_bad_steps=int(job.optimizer.max_bad_steps),
        record_samples=job.run.record_samples,
    )  # fmt: skip
    with RunObserver(
        directory, world.rank, steps=session.steps, start_step=session.start_step, log_every=job.run.log_every,
        telemetry=job.telemetry,
    ) as observer, closing(_keeper(resolved, data, world, directory, session, observer)) as keeper:  # fmt: skip
        session.keeper = keeper
        timers = loop.step_timers(session)
        digest = _weights_hash(resolved, session)
        if session.is_writer:
            _keep_tokenizer(data, directory)
            observer.write(started_record(resolved, session, directory, started, digest))
            tell_start(session, observer)
        outcome = loop.train(session, policy, observer, timers)
        if outcome.stopped:
            raise end_early(session, keeper, observer, outcome, float(job.recovery.grace))
        beat(outcome.steps, "ending the run", 600.0, "save")
        peaks = gather_objects(peak_memory_bytes(session.device), session.group)
        compiled = recompiles() if resolved.compile else None
        keeper.finish(outcome.steps, outcome.evals)
        sample = sample_text(resolved, data, session) if session.is_writer or session.in_step else ""
        if session.is_writer:
            finish(resolved, data, session, observer, outcome, peaks, compiled, sample)
    session.wait_for_all()


def _keeper(
    resolved: Resolved,
    data: PreparedData,
    world: World,
    directory: RunDirectory,
    session: Session,
    observer: RunObserver,
) -> Keeper:
    about = {
        "model": msgspec.to_builtins(resolved.spec),
        "data": {"folder": str(data.folder), "tokenizer": resolved.job.data.tokenizer,
                 "fingerprint": data.tokenizer.fingerprint, "text": data.manifest.fingerprint},
    }  # fmt: skip
    layout = {
        **resolved.layout.to_record(), "microbatch": resolved.batch.microbatch, "precision": resolved.precision,
        "compile": int(resolved.compile),
    }  # fmt: skip
    if resolved.layout.dp_shard > 1:
        layout["zero_stage"] = resolved.fsdp.zero_stage
    return make_keeper(
        session, world, directory, resolved.job.checkpoint, observer, about=about, layout=layout,
        precision=resolved.precision, best_of=HELD_OUT if HELD_OUT in data.evals else next(iter(data.evals), None),
        grace=float(resolved.job.recovery.grace),
    )  # fmt: skip


def _keep_tokenizer(data: PreparedData, directory: RunDirectory) -> None:
    """Beside the checkpoints, so that they can be read wherever the tokenizer came from."""
    if isinstance(data.tokenizer, FileTokenizer):
        write_atomic(directory.path / TOKENIZER_FILE, data.tokenizer.to_json())


def _weights_hash(resolved: Resolved, session: Session) -> str | None:
    """Of the initial weights whole, on the writer; where they are split, every rank takes part."""
    if parameter_count(resolved.spec) > MAX_HASHED_PARAMETERS:
        return None
    if session.is_writer:
        return hash_in_order(session.whole_weights())
    if session.in_step:
        for _ in session.whole_weights():
            pass
    return None

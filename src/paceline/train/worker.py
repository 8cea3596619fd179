"""One rank of `paceline train`: join, prepare, train, save. Started by `train.run`, or by torchrun."""

from __future__ import annotations

import json
import platform
import resource
import sys
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any, cast

import msgspec
import torch

from paceline import __version__
from paceline.cluster.probe import probe_host
from paceline.data.bigram import bigram_loss
from paceline.data.config import HELD_OUT
from paceline.data.prepare import PreparedData, prepare
from paceline.data.tokenizer import FileTokenizer
from paceline.job.load import Job
from paceline.job.resolve import Resolved, resolve_job, with_samples
from paceline.model.generate import generate
from paceline.model.init import hash_in_order
from paceline.model.spec import parameter_count
from paceline.model.transformer import Decoder
from paceline.parallel.collectives import gather_objects
from paceline.parallel.compile.apply import recompiles
from paceline.run.directory import RunDirectory
from paceline.run.files import write_atomic
from paceline.run.records import Derivation, RunFinished, RunStarted
from paceline.train import loop, shared_run
from paceline.train.continue_text import TOKENIZER_FILE
from paceline.train.evaluate import eagerly
from paceline.train.keep import Keeper
from paceline.train.keeping import check_model, make_keeper, make_room, tell_start
from paceline.train.observe import RunObserver
from paceline.train.out_of_memory import explain_out_of_memory
from paceline.train.resume import Start, resume
from paceline.train.session import Session
from paceline.train.startup import build_session, world_group
from paceline.train.state import TrainingState
from paceline.workers.environment import is_supervised
from paceline.workers.heartbeat import beat
from paceline.workers.rendezvous import World, join, leave
from paceline.workers.verdict import reported

SAMPLE_TOKENS = 240

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
                write_atomic(directory.plan_file, json.dumps(plan(resolved), indent=1))
            _attempt(resolved, world, directory, started)
        if alone:
            report(directory.path)
        return 0
    finally:
        leave(world)


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
            observer.write(_started(resolved, session, directory, started, digest))
            tell_start(session, observer)
        outcome = loop.train(session, policy, observer, timers)
        beat(outcome.steps, "ending the run", allow_seconds=600.0)
        peaks = gather_objects(peak_memory_bytes(session.device), session.group)
        compiled = recompiles() if resolved.compile else None
        keeper.finish(outcome.steps, outcome.evals)
        sample = _sample(resolved, data, session) if session.is_writer or session.in_step else ""
        if session.is_writer:
            _finish(resolved, data, session, observer, outcome, peaks, compiled, sample)
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


def _started(
    resolved: Resolved, session: Session, directory: RunDirectory, started: float, digest: str | None
) -> RunStarted:
    return RunStarted(
        step=session.start_step,
        samples=session.start_step * session.samples_per_step,
        run_id=directory.run_id,
        job_digest=directory.job_digest,
        world_size=session.world_size,
        layout=dict(resolved.layout.degrees()),
        device=resolved.host.device_name,
        precision=resolved.precision,
        compile=resolved.compile,
        microbatch=resolved.batch.microbatch,
        accumulation=resolved.batch.accumulation,
        global_batch=resolved.batch.global_batch,
        sequence_length=resolved.job.data.sequence_length,
        parameters=parameter_count(resolved.spec),
        flop_per_token=session.flop_per_token,
        flop_convention="palm",
        peak_flop_per_second=session.peak_flop_per_second,
        weights_hash=digest,
        versions={"paceline": __version__, "torch": str(torch.__version__), "python": platform.python_version()},
        host=platform.node(),
        threads_per_rank=torch.get_num_threads(),
        planned_memory=resolved.memory.to_record(),
        derivations=[Derivation(d.key, d.value, d.formula) for d in resolved.derivations],
        launched=shared_run.launched_at(started),
    )


def _finish(
    resolved: Resolved,
    data: PreparedData,
    session: Session,
    observer: RunObserver,
    outcome: loop.Outcome,
    peaks: list[int],
    compiled: int | None,
    sample: str,
) -> None:
    """The bigram model's loss beside ours, and a sample."""
    bigram = None
    if HELD_OUT in data.evals:
        bigram = bigram_loss(data.train, data.evals[HELD_OUT], int(resolved.job.data.eval_sequences))
    rate = outcome.tokens_per_second
    observer.write(
        RunFinished(
            step=outcome.steps, exit=0, reason="done", steps=outcome.steps,
            samples=outcome.steps * session.samples_per_step, loss=outcome.loss,
            eval_loss=outcome.evals.get(HELD_OUT), bigram_eval_loss=bigram, tokens=outcome.tokens,
            seconds=outcome.seconds, tokens_per_second=rate, mfu=session.mfu(rate) if rate else None,
            peak_memory_bytes=peaks, recompiles=compiled,
        )
    )  # fmt: skip
    if HELD_OUT in outcome.evals:
        beside = "" if bigram is None else f"; a bigram model fitted on the same text has {bigram:.4f}"
        observer.say(f"eval loss {outcome.evals[HELD_OUT]:.4f} nats per token{beside}")
    observer.say(sample)


def _sample(resolved: Resolved, data: PreparedData, session: Session) -> str:
    prompt = [data.tokenizer.separator]
    # Blocks that are gathered in 16 bit multiply in it, as they do in training.
    with eagerly(), session.autocast() if session.in_step else nullcontext():
        ids = generate(
            cast(Decoder, session.model), prompt, max_new_tokens=SAMPLE_TOKENS, temperature=0.8, top_k=40,
            seed=resolved.job.run.seed, vocabulary=data.tokenizer.vocabulary,
        )  # fmt: skip
    session.settle()
    return f"sample:\n{data.tokenizer.decode(ids)}"


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory that this rank held: resident set on a CPU, allocated on a GPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

"""What the writer rank says when an attempt begins and when the run ends: records, the bigram model's loss, a sample."""

from __future__ import annotations

import platform
import resource
import sys
import time
from contextlib import nullcontext
from typing import cast

import torch

from paceline import __version__
from paceline.data.bigram import bigram_loss
from paceline.data.config import HELD_OUT
from paceline.data.prepare import PreparedData
from paceline.errors import Preempted
from paceline.job.resolve import Resolved
from paceline.model.generate import generate
from paceline.model.spec import parameter_count
from paceline.model.transformer import Decoder
from paceline.parallel.collectives import gather_objects
from paceline.parallel.context.apply import whole_sequences
from paceline.run.directory import RunDirectory
from paceline.run.records import Derivation, RunFinished, RunStarted
from paceline.train import shared_run
from paceline.train.evaluate import eagerly
from paceline.train.keep import Keeper
from paceline.train.loop import Outcome
from paceline.train.observe import RunObserver
from paceline.train.requests import preempted
from paceline.train.session import Session

SAMPLE_TOKENS = 240


def started_record(
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


def finish(
    resolved: Resolved,
    data: PreparedData,
    session: Session,
    observer: RunObserver,
    outcome: Outcome,
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


def end_early(session: Session, keeper: Keeper, observer: RunObserver, outcome: Outcome, grace: float) -> Preempted:
    """See to it that the save of a run that was asked to stop is durable; returns the error that the attempt ends with.

    Called by all ranks, which return together.

    Args:
        grace: seconds from the request until the end of the run that are promised.

    Raises:
        PacelineError: the state could not be written.
    """
    began = time.monotonic()
    heard = gather_objects(keeper.heard(), session.group)
    keeper.stop(outcome.steps)
    # On the host first: ranks of different hosts may be further apart here than a collective waits.
    session.wait_for_all()
    waited = max(gather_objects(time.monotonic() - began, session.group))
    error = preempted(outcome.steps, heard, waited, grace)
    if session.is_writer:
        rate = outcome.tokens_per_second
        observer.write(
            RunFinished(
                step=outcome.steps, exit=error.exit_code, reason=error.message, steps=outcome.steps,
                samples=outcome.steps * session.samples_per_step, loss=outcome.loss, tokens=outcome.tokens,
                seconds=outcome.seconds, tokens_per_second=rate, mfu=session.mfu(rate) if rate else None,
            )
        )  # fmt: skip
    return error


def sample_text(resolved: Resolved, data: PreparedData, session: Session) -> str:
    stages = session.step.stages
    prompt, model = [data.tokenizer.separator], cast(Decoder, session.model)
    # Blocks that are gathered in 16 bit multiply in it, as they do in training.
    with eagerly(), whole_sequences(model), session.autocast() if session.in_step else nullcontext():
        ids = generate(
            model, prompt, max_new_tokens=SAMPLE_TOKENS, temperature=0.8, top_k=40,
            seed=resolved.job.run.seed, vocabulary=data.tokenizer.vocabulary,
            logits_at=None if stages is None else stages.logits_at,
        )  # fmt: skip
    session.settle()
    return f"sample:\n{data.tokenizer.decode(ids)}"


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory that this rank held: resident set on a CPU, allocated on a GPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

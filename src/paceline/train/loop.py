"""The loop over optimizer steps: batches in, records out, and the policies that stand outside a step."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch

from paceline.errors import PacelineError
from paceline.parallel.collectives import gather_objects
from paceline.parallel.control import VOTES
from paceline.parallel.waits import count_waits, waited_seconds
from paceline.run.records import Eval, Record, Samples, Step, Window
from paceline.telemetry.timers import StepTimers
from paceline.train.evaluate import evaluate
from paceline.train.session import Session
from paceline.train.step import NOT_FINITE, Batch, StepResult, on_device
from paceline.train.window import HOST
from paceline.workers import stop
from paceline.workers.heartbeat import beat

SYNCHRONIZE_EVERY = 10
"""On a device that runs behind the host, parts of a step are timed in every tenth step: timing them costs speed."""


NO_VOTES = (0.0,) * len(VOTES)


class Observer(Protocol):
    """Where records go: files, the live line, exporters. Every rank has one; those that do not write ignore steps."""

    def step(self, record: Step) -> None: ...
    def write(self, record: Record) -> None: ...


@dataclass
class Policy:
    """What to do beside stepping: when to log and evaluate, how many bad steps are borne, whether to record samples."""

    log_every: int = 10
    eval_every: int = 0
    stop_on_bad_step: bool = False
    max_bad_steps: int = 5
    record_samples: bool = False

    @property
    def bad_step_limit(self) -> int:
        """Bad steps in a row that end the run."""
        return 1 if self.stop_on_bad_step else self.max_bad_steps


@dataclass
class Outcome:
    """What an attempt came to. `steady_seconds` are those of all steps but the first, which builds buckets and kernels;
    `stopped` where it was asked to end early."""

    steps: int
    loss: float | None = None
    grad_norm: float | None = None
    tokens: int = 0
    seconds: float = 0.0
    steady_tokens: int = 0
    steady_seconds: float = 0.0
    stopped: bool = False
    evals: dict[str, float] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float | None:
        if self.steady_seconds:
            return self.steady_tokens / self.steady_seconds
        return self.tokens / self.seconds if self.seconds else None


def train(session: Session, policy: Policy, observer: Observer, timers: StepTimers | None = None) -> Outcome:
    """Train from `session.start_step` to `session.steps`, evaluating as the policy says and at the end.

    A run that is asked to stop ends after a step with its save in flight, and is not evaluated then.

    Raises:
        PacelineError: too many bad steps in a row.
    """
    outcome = Outcome(steps=session.start_step)
    for _ in iterate(session, policy, observer, outcome, timers):
        pass
    return outcome


def iterate(
    session: Session, policy: Policy, observer: Observer, outcome: Outcome, timers: StepTimers | None = None
) -> Iterator[Step]:
    """`train`, step by step: yields the record of each step once it is done, and fills `outcome`."""
    timers = timers or step_timers(session)
    done: Step | None = None
    bad_in_a_row = 0
    session.model.train()
    batches = iter(session.batches)
    keeper = session.keeper
    session.restore_random()
    for step in range(session.start_step, session.steps):
        timers.begin(step + 1)
        if done is not None:
            # Written inside the next step's time, so that what records cost is a part of a step like any other.
            with timers.overhead("records"):
                _record(session, policy, observer, timers, done)
        beat(step, "waiting for data", section="data")
        read = next(batches, None)
        if read is None:
            # A stream that ended: its ranks have agreed on that, so all of them stop here.
            break
        microbatches = _on_device(read, session, step)
        timers.mark("data_wait")
        beat(step, "training step")
        votes = keeper.votes(step) if keeper else NO_VOTES
        result = session.step(microbatches, session.schedule(step), timers.mark, votes)
        # The first step may compile for minutes, and nothing is lost by leaving it; any later one is finished and saved.
        stop.only_note()
        seconds, parts = timers.end()
        done = _step_record(session, outcome, result, step, seconds, parts)
        bad_in_a_row = bad_in_a_row + 1 if result.skipped == NOT_FINITE else 0
        if bad_in_a_row >= policy.bad_step_limit:
            observer.step(done)
            raise _too_many_bad_steps(result, bad_in_a_row, policy, step)
        try:
            yield done
        except GeneratorExit:
            _record(session, policy, observer, timers, done)
            raise
        if policy.record_samples:
            _record_samples(session, observer, microbatches, step)
        evals = None
        outcome.stopped = keeper is not None and keeper.stops(step + 1, result)
        if (
            not outcome.stopped
            and policy.eval_every
            and (step + 1) % policy.eval_every == 0
            and step + 1 < session.steps
        ):
            evals = _evaluate_all(session, observer, outcome)
        if keeper and (keeper.wants(step + 1, result, seconds, evals) or outcome.stopped):
            # Its record first: whoever resumes from the save has the steps before it on record.
            _record(session, policy, observer, timers, done)
            done = None
            keeper.save(step + 1, evals)
        if outcome.stopped:
            return
    if done is not None:
        _record(session, policy, observer, timers, done)
    _evaluate_all(session, observer, outcome)


def step_timers(session: Session) -> StepTimers:
    """Timers that fit the session's device."""
    if session.device.type == "cuda":
        return StepTimers(lambda: torch.cuda.synchronize(session.device), SYNCHRONIZE_EVERY)
    if session.group is None:
        return StepTimers()
    count_waits()
    return StepTimers(waited=waited_seconds)


def _on_device(microbatches: list[Batch], session: Session, step: int) -> list[Batch]:
    moved = [on_device(session.part_of(batch), session.device) for batch in microbatches]
    return [{**batch, "step": step} for batch in moved] if session.batch_needs_step else moved


def _step_record(
    session: Session, outcome: Outcome, result: StepResult, step: int, seconds: float, parts: dict[str, float]
) -> Step:
    tokens = session.tokens_per_step
    outcome.steps, outcome.loss, outcome.grad_norm = step + 1, result.loss, result.grad_norm
    outcome.tokens += tokens
    outcome.seconds += seconds
    if step > session.start_step:
        outcome.steady_tokens += tokens
        outcome.steady_seconds += seconds
    rate = tokens / seconds
    return Step(
        step=step + 1, loss=result.loss, grad_norm=result.grad_norm, lr=result.lr, tokens=tokens, seconds=seconds,
        tokens_per_second=rate, mfu=session.mfu(rate), samples=(step + 1) * session.samples_per_step,
        skipped=result.skipped is not None, parts=parts,
    )  # fmt: skip


def _record(session: Session, policy: Policy, observer: Observer, timers: StepTimers, done: Step) -> None:
    observer.step(done)
    if done.step % policy.log_every == 0 or done.step == session.steps:
        first = (done.step - 1) // policy.log_every * policy.log_every + 1
        parts, own = timers.window()
        observer.write(
            Window(
                step=done.step, first_step=max(session.start_step + 1, first), rank=session.rank, host=HOST,
                parts=parts, own=own, **session.window_facts(),
            )
        )  # fmt: skip


def _too_many_bad_steps(result: StepResult, bad_in_a_row: int, policy: Policy, step: int) -> PacelineError:
    """All ranks raise alike, since the step decided on reduced values."""
    return PacelineError(
        f"step {step + 1}: loss {result.loss} and gradient norm {result.grad_norm} are not finite, "
        f"{bad_in_a_row} step{'s' if bad_in_a_row > 1 else ''} in a row",
        key="optimizer.bad_step" if policy.stop_on_bad_step else "optimizer.max_bad_steps",
        values={"step": step + 1, "loss": str(result.loss), "grad_norm": str(result.grad_norm), "bad": bad_in_a_row},
        hint="Lower optimizer.lr, lengthen optimizer.warmup_steps, or look at the data of this step.",
    )


def _record_samples(session: Session, observer: Observer, microbatches: list[Batch], step: int) -> None:
    own = [int(i) for batch in microbatches for i in batch["sample_ids"].tolist()] if session.counts_samples else []
    ids = sorted(i for ids in gather_objects(own, session.group) for i in ids)
    if session.is_writer:
        observer.write(Samples(step=step + 1, ids=ids))


def _evaluate_all(session: Session, observer: Observer, outcome: Outcome) -> dict[str, float]:
    """The losses by name, equal on all ranks."""
    for name, batches in session.evals.items():
        beat(outcome.steps, f"evaluating {name}", section="evaluation")
        started = time.perf_counter()
        result = evaluate(
            session.model, session.forward, session.loss, batches(), group=session.group, device=session.device,
            autocast=session.autocast, wait_for_all=session.wait_for_all, settle=session.settle,
            counts=session.step.counts,
        )  # fmt: skip
        outcome.evals[name] = result.loss
        if session.is_writer:
            observer.write(
                Eval(step=outcome.steps, name=name, loss=None if math.isnan(result.loss) else result.loss,
                     weight=result.weight, seconds=time.perf_counter() - started)
            )  # fmt: skip
    return dict(outcome.evals)

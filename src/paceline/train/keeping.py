"""From a run and its session to what saves it: rules, heads and records put together, for the command and for a `Trainer`."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from paceline.checkpoint.config import CheckpointSection
from paceline.checkpoint.folders import list_steps
from paceline.checkpoint.interval import RECOVERY_SECONDS, failure_rate
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.messages import KeepRule, SaveHead
from paceline.checkpoint.saver import Saver
from paceline.checkpoint.schedule import Schedule
from paceline.checkpoint.space import TENSOR_HEAD_BYTES, preflight
from paceline.checkpoint.storage import open_storage
from paceline.checkpoint.writer_lock import wait_for_old_writer
from paceline.data.prepare import PreparedData
from paceline.errors import JobError
from paceline.job.resolve import Resolved
from paceline.run.control import Control
from paceline.run.directory import RunDirectory
from paceline.run.history import History, history
from paceline.train.certificate import certify, describe
from paceline.train.keep import Keeper, Voice
from paceline.train.observe import RunObserver
from paceline.train.requests import Requests
from paceline.train.resume import is_imported
from paceline.train.session import Session
from paceline.train.state import TrainingState
from paceline.train.step import StepResult
from paceline.workers.rendezvous import World

BEST_EVAL = "best_eval"


def make_keeper(
    session: Session,
    world: World,
    directory: RunDirectory,
    section: CheckpointSection,
    observer: RunObserver,
    *,
    about: Mapping[str, Any],
    layout: Mapping[str, int | str],
    precision: str,
    best_of: str | None,
    grace: float,
) -> Keeper:
    """What saves a session's state.

    Args:
        about: model, data and tokenizer, for readers of the manifest.
        layout: all that decides whether a resume can be exact.
        precision: of the run, which decides how near one that is not has to come.
        best_of: the eval set whose best loss counts, unless the job names one.
        grace: seconds between a stop signal and the end that are promised.
    """
    state = session.state
    assert state is not None
    rule = KeepRule(
        keep=section.keep,
        keep_best=section.keep_best,
        protected=(session.start_step,) if session.start.manifest else (),
    )
    voice = Voice(observer.write, observer.say)
    best_name = (section.best_of or best_of) if section.keep_best else None

    def head(step: int, evals: Mapping[str, float]) -> SaveHead:
        directory.check_attempt()
        loss = evals.get(best_name or best_of or "", math.nan)
        return SaveHead(
            step=step, samples=step * session.samples_per_step, layout=dict(layout), about=dict(about),
            state={**state.shared(), BEST_EVAL: keeper.best}, eval_loss=loss if math.isfinite(loss) else None,
        )  # fmt: skip

    manifest = session.start.manifest

    def first_after_resume(result: StepResult) -> None:
        assert manifest is not None
        verdict = certify(manifest, layout, result, precision)
        observer.write(verdict)
        observer.say(describe(verdict))

    keeper: Keeper
    place = section.place(directory.path)
    saver = Saver(
        storage_place=place, placed=state.placed(), world=world,
        run_id=directory.run_id, attempt=directory.attempt, keep=rule, timeout_seconds=float(section.storage_timeout),
        notify=lambda event: keeper.told(event),
    )  # fmt: skip
    keeper = Keeper(
        saver, make_schedule(section, directory, world), state.own, head, voice, place=place,
        certify=first_after_resume if manifest and not is_imported(manifest) and session.is_writer else None,
        rank=world.rank, last_step=session.steps, start_step=session.start_step,
        has_start=session.start.manifest is not None and session.start.own,
        timeout_seconds=float(section.storage_timeout), best_of=best_name,
        requests=Requests(Control(directory.path) if session.is_writer else None, observer.say),
        grace=grace,
        best=manifest.state.get(BEST_EVAL) if manifest is not None and session.start.own else None,
    )  # fmt: skip
    return keeper


def make_schedule(section: CheckpointSection, directory: RunDirectory, world: World) -> Schedule:
    """When to save, by how often this run has failed so far where that is more than such runs do."""
    past = history(directory.path) if world.rank == 0 else History()
    rate = failure_rate(world.world_size, failures=past.failures, run_seconds=past.run_seconds)
    return Schedule.of(
        section, now=time.monotonic(), ranks=world.world_size, failures_per_second=rate,
        recovery_seconds=RECOVERY_SECONDS if past.recovery_seconds is None else past.recovery_seconds,
    )  # fmt: skip


def make_room(section: CheckpointSection, place: str, state: TrainingState, ranks: int) -> list[str]:
    """On rank 0, before step 0: wait for what an attempt before is still writing, and see that a checkpoint fits.

    Raises:
        DiskFull: not one does.
        PacelineError: the storage cannot be used.
    """
    notes: list[str] = []
    wait_for_old_writer(place, float(section.storage_timeout), notes.append)
    storage = open_storage(place)
    sizes = [math.prod(p.shape) * p.tensor.element_size() + TENSOR_HEAD_BYTES for p in state.placed()]
    return notes + preflight(storage, sum(sizes), section.keep, ranks=ranks, present=len(list_steps(storage)))


def tell_start(session: Session, observer: RunObserver) -> None:
    """On rank 0: where the attempt begins, and what came of looking for that."""
    for record in session.start.records:
        observer.write(record)
    for note in (*session.start.notes, *session.notes):
        observer.say(note)


def check_model(manifest: Manifest, resolved: Resolved, data: PreparedData, *, own: bool) -> None:
    """Refuse a checkpoint whose numbers mean something else: of another vocabulary, or (of the run's `own`) another text.

    Raises:
        JobError: with what is there and what the job has.
    """
    there: Mapping[str, Any] = manifest.about.get("data", {})
    job = resolved.job
    if there.get("fingerprint", data.tokenizer.fingerprint) != data.tokenizer.fingerprint:
        raise JobError(
            f"the checkpoint of step {manifest.step} was trained with another vocabulary: its tokenizer is "
            f"{there.get('tokenizer')} ({str(there['fingerprint'])[:16]}), the job's is "
            f"{job.data.tokenizer} ({data.tokenizer.fingerprint[:16]})",
            key="data.tokenizer",
            values={"checkpoint": there["fingerprint"], "job": data.tokenizer.fingerprint},
            hint="Name the tokenizer that it was trained with, or start beside it with checkpoint.resume=never.",
        )
    allowed = any(key.startswith("data.") for key in job.checkpoint.allow_change)
    if own and not allowed and there.get("text", data.manifest.fingerprint) != data.manifest.fingerprint:
        raise JobError(
            f"the text has changed since step {manifest.step} was saved: its fingerprint was {str(there['text'])[:16]} and "
            f"is {data.manifest.fingerprint[:16]}, so that the samples that come would be others",
            key="data.source",
            values={"checkpoint": there["text"], "job": data.manifest.fingerprint},
            hint="Put the text back, start beside this run with checkpoint.resume=never, or allow it with "
            'checkpoint.allow_change=["data.source"].',
        )

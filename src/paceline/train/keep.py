"""When a run saves and what becomes of it: the policy between the loop, which offers every step, and the saver.

That a save is due is rank 0's to say, that the one before is still being written every host's, that the run is to stop any
rank's. All of it travels with the step's own sum, so all ranks save at the same step without a word more.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from paceline.checkpoint.folders import step_folder
from paceline.checkpoint.grace import Measured
from paceline.checkpoint.grace import chain as grace_chain
from paceline.checkpoint.manifest import NextStep
from paceline.checkpoint.messages import Event, SaveHead
from paceline.checkpoint.saver import Saver
from paceline.checkpoint.schedule import Schedule
from paceline.errors import PacelineError
from paceline.run.records import Checkpoint, Record
from paceline.train.requests import Heard, Requests
from paceline.train.save_cost import SaveMeter
from paceline.train.step import StepResult
from paceline.workers.heartbeat import beat

Head = Callable[[int, Mapping[str, float]], SaveHead]


class Voice:
    """Where rank 0 writes records and speaks; other ranks have a silent one."""

    def __init__(self, write: Callable[[Record], None], say: Callable[[str], None]) -> None:
        self.write, self.say = write, say


class Keeper:
    """Saves a session's state while it trains, and at its end.

    Args:
        saver: copies and writes; its events come to `told`.
        schedule: when the next save is due; asked on rank 0 alone.
        own: this rank's part of what is no tensor.
        head: what rank 0 says about a save: of the step it holds and the losses of the last evaluation.
        voice: rank 0's.
        place: folder or URL of the checkpoints.
        certify: on rank 0, told the result of the first step after a resume.
        rank: this one.
        last_step: the step of the final save, which `finish` makes.
        start_step: the step that the attempt begins after. has_start: whether a checkpoint of it is in `place`.
        timeout_seconds: how long a save may be in flight.
        requests: to this rank.
        grace: seconds between a stop signal and the end that the run is promised.
        best_of: eval set whose best loss so far is saved besides; None for none. best: that loss.
    """

    def __init__(
        self,
        saver: Saver,
        schedule: Schedule,
        own: Callable[[], dict[str, Any]],
        head: Head,
        voice: Voice,
        *,
        place: str,
        certify: Callable[[StepResult], None] | None,
        rank: int,
        last_step: int,
        start_step: int,
        has_start: bool,
        timeout_seconds: float,
        requests: Requests | None = None,
        grace: float = math.inf,
        best_of: str | None = None,
        best: float | None = None,
    ) -> None:
        self._saver, self._schedule, self._own, self._head = saver, schedule, own, head
        self._voice, self._certify, self._rank, self._place = voice, certify, rank, place
        self._last_step, self._start_step, self._saved_step = last_step, start_step, start_step
        self._failed_step = -1
        self._has_start = has_start
        self._timeout_seconds = timeout_seconds
        self._requests = requests or Requests(None)
        self._asked_step: int | None = None
        self._grace = grace
        self._longest_step = 0.0
        self._best_of, self.best = best_of, best
        self._meter = SaveMeter()
        self._stall_seconds = 0.0
        self._waited_seconds = 0.0
        self._skipped = 0

    def votes(self, step: int) -> tuple[float, ...]:
        """This rank's part of what is agreed in the step that comes, the first being 0."""
        due = self._rank == 0 and step + 1 < self._last_step and self._due(step + 1)
        return float(due), float(self._saver.busy()), float(self._requests.wants_stop())

    def stops(self, step: int, result: StepResult) -> bool:
        """Whether all ranks save after `step` and end there; in the last step they end anyhow."""
        return bool(result.votes[2]) and step < self._last_step

    def wants(self, step: int, result: StepResult, seconds: float, evals: Mapping[str, float] | None) -> bool:
        """Whether all ranks save after optimizer step number `step`, counted from 1; `evals` are those of this step."""
        due, busy, _ = result.votes
        if step == self._start_step + 1:
            # Now, so that a lack of memory shows early and the first save is as short as the others.
            self._saver.prepare()
        if self._rank == 0:
            self._tell(step, result)
            self._meter.stepped(seconds, writing=bool(busy))
            if step > self._start_step + 1:
                self._longest_step = max(self._longest_step, seconds)
            self._saver.poll()
            self._tell_skipped(step)
        if self._is_best(evals):
            return True
        return bool(due and not busy and step < self._last_step)

    def save(self, step: int, evals: Mapping[str, float] | None) -> None:
        """Copy the state of this moment and leave it to the writer; called by all ranks at the same step."""
        if self._saver.busy():
            self._wait(step)
        self._save(step, evals or {})

    def finish(self, step: int, evals: Mapping[str, float]) -> None:
        """The save after the last step, and the end of those in flight.

        Raises:
            PacelineError: it could not be written; on every rank.
        """
        self._wait(step)
        if self._rank == 0:
            self._schedule.ended()
            self._tell_skipped(step)
        is_saved = self._has_start if step == self._start_step else step == self._saved_step != self._failed_step
        if not is_saved:
            self._save(step, evals, final=True)
            self._wait(step, required=True)
        self._requests.stopped()

    def heard(self) -> Heard | None:
        """What this rank heard of a request to stop."""
        return self._requests.heard()

    def stop(self, step: int) -> None:
        """The end of a run that was asked to stop and whose save after `step` is in flight.

        Raises:
            PacelineError: it could not be written; on every rank.
        """
        self._wait(step, required=True)
        if self._rank == 0:
            self._schedule.ended()
        self._requests.stopped()

    def close(self) -> None:
        """End what the saver holds."""
        self._saver.close()

    def told(self, event: Event) -> None:
        """Rank 0: what the saver says becomes a record; a failure is said aloud, and what a save cost moves the next."""
        if event.state == "written":
            return
        reason = event.text if event.error is None else str(event.error.get("message"))
        if event.state == "failed" and not event.number:
            # Not the end of a save: an old checkpoint that could not be removed, or a save that takes long.
            self._voice.say(f"warning: {reason}")
            return
        blocked = self._blocked_in(event)
        self._voice.write(
            Checkpoint(step=event.step, state=event.state, path=self._path(event), bytes=event.size_bytes,
                       seconds=event.seconds or 0.0, blocked_seconds=blocked, reason=reason)
        )  # fmt: skip
        if event.state in ("durable", "failed") and event.step == self._asked_step:
            self._asked_step = None
            self._requests.saved()
        if event.state == "failed":
            self._voice.say(f"warning: the checkpoint of step {event.step} was NOT saved, training goes on: {reason}")
        elif event.state == "durable" and event.seconds is not None:
            self._weigh_grace(event.seconds)
            news = self._schedule.measured(self._meter.cost(self._stall_seconds, event.seconds))
            if news:
                self._voice.say(news)

    def _due(self, step: int) -> bool:
        # The schedule counts its calls: asked in every step, whatever else wants a save.
        scheduled = self._schedule.due(step, time.monotonic())
        return scheduled or self._requests.wants_save()

    def _weigh_grace(self, save_seconds: float) -> None:
        """Say once that a stop signal would cost the last steps."""
        chain = grace_chain(Measured(save_seconds, self._longest_step), self._grace, os.environ)
        if not chain.holds:
            self._grace = math.inf
            self._voice.say(
                f"warning: a stop signal would cost the steps since the checkpoint before: {chain.explain()}; "
                f"recovery.grace={math.ceil(chain.need or 0)}s would do, where what stops the run leaves as much"
            )

    def _path(self, event: Event) -> str:
        return f"{self._place.rstrip('/')}/{event.folder or step_folder(event.step)}"

    def _blocked_in(self, event: Event) -> float | None:
        """Seconds for which training stood still in the phase that ends: while copying, or (the last save) waiting."""
        if event.state == "staged":
            return self._stall_seconds
        if event.state not in ("durable", "failed"):
            return None
        waited, self._waited_seconds = self._waited_seconds, 0.0
        return waited

    def _tell_skipped(self, step: int) -> None:
        if self._schedule.skipped > self._skipped:
            self._skipped = self._schedule.skipped
            reason = "the save before is still being written"
            self._voice.write(Checkpoint(step=step, state="skipped", path="", reason=reason))

    def _tell(self, step: int, result: StepResult) -> None:
        """What came of the step after a save or after the resume."""
        if step != self._saved_step + 1:
            return
        if self._saved_step == self._start_step:
            if self._certify is not None:
                self._certify(result)
            return
        self._saver.next_step(NextStep(step, _finite(result.loss), _finite(result.grad_norm)))

    def _save(self, step: int, evals: Mapping[str, float], *, final: bool = False) -> None:
        beat(step, "copying the state for a save", self._timeout_seconds, "save")
        began = time.perf_counter()
        head = msgspec.structs.replace(self._head(step, evals), final=final)
        self._saver.save(head, self._own())
        self._stall_seconds = time.perf_counter() - began
        self._saved_step = step
        if self._rank == 0:
            self._asked_step = step if self._requests.wants_save() else None
            self._schedule.saved(time.monotonic())

    def _wait(self, step: int, *, required: bool = False) -> None:
        """Until nothing is in flight. A failed periodic save was told as an event; a failed final one ends the run."""
        beat(step, "waiting for the checkpoint to be written", self._timeout_seconds, "save")
        began = time.perf_counter()
        try:
            self._saver.wait()
        except PacelineError:
            self._failed_step = self._saved_step
            if required:
                raise
        finally:
            self._waited_seconds += time.perf_counter() - began
            if self._rank == 0:
                self._saver.poll()

    def _is_best(self, evals: Mapping[str, float] | None) -> bool:
        """Whether this step's evaluation is the best so far: equal on all ranks, since its loss is."""
        if self._best_of is None or not evals or self._best_of not in evals:
            return False
        loss = evals[self._best_of]
        if math.isnan(loss) or (self.best is not None and not loss < self.best):
            return False
        self.best = loss
        return True


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None

"""Other places that a run's records go to. An exporter is fed records and never asks for more."""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from paceline.errors import JobError
from paceline.run.records import Eval, Record, Step


class Exporter(Protocol):
    """What the training loop sees of an exporter."""

    def write(self, record: Record) -> None:
        """Export a record; kinds that mean nothing to the exporter are passed over."""

    def close(self) -> None:
        """Flush and close."""


class TensorBoardExporter:
    """Writes `step` and `eval` records as TensorBoard scalars; one folder for all attempts of a run.

    A resumed attempt first tells TensorBoard to forget the steps that it does again, so each step stands once and the
    curves rise. Of TensorBoard, only its event writer is loaded, which needs neither torch nor TensorFlow.

    Args:
        directory: the folder of the event files.
        start_step: the step that the attempt begins after.
        clock: seconds since the epoch.

    Raises:
        JobError: tensorboard is not installed.
    """

    def __init__(self, directory: Path, start_step: int = 0, clock: Callable[[], float] = time.time) -> None:
        self._event, self._summary, writer = _tensorboard()
        self._clock = clock
        self._last_step = start_step
        self._writer: Any = writer(str(directory))
        if start_step > 0:
            log = self._event.SessionLog(status=self._event.SessionLog.START)
            self._writer.add_event(self._event.Event(wall_time=clock(), step=start_step + 1, session_log=log))

    def write(self, record: Record) -> None:
        """Export a step (once: a step that does not rise is passed over) or an evaluation."""
        if isinstance(record, Step):
            if record.step <= self._last_step:
                return
            self._last_step = record.step
            self._scalars(record.step, _step_scalars(record))
        elif isinstance(record, Eval):
            self._scalars(record.step, {f"eval/{record.name}_loss": record.loss})

    def close(self) -> None:
        self._writer.close()

    def _scalars(self, step: int, scalars: dict[str, float | None]) -> None:
        values = [
            self._summary.Summary.Value(tag=tag, simple_value=math.nan if value is None else value)
            for tag, value in scalars.items()
        ]
        summary = self._summary.Summary(value=values)
        self._writer.add_event(self._event.Event(wall_time=self._clock(), step=step, summary=summary))


def _step_scalars(step: Step) -> dict[str, float | None]:
    scalars = {
        "train/loss": step.loss,
        "train/grad_norm": step.grad_norm,
        "train/lr": step.lr,
        "throughput/tokens_per_second": step.tokens_per_second,
        "throughput/step_seconds": step.seconds,
    }
    if step.mfu is not None:
        scalars["throughput/mfu"] = step.mfu
    return scalars | {f"step_seconds/{part}": seconds for part, seconds in step.parts.items()}


def _tensorboard() -> tuple[Any, Any, Any]:
    try:
        event = importlib.import_module("tensorboard.compat.proto.event_pb2")
        summary = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
    except ImportError as error:
        raise JobError(
            f"true, but tensorboard cannot be loaded: {error}",
            key="telemetry.tensorboard",
            hint="Install it with `pip install 'paceline[tensorboard]'`, or set telemetry.tensorboard=false.",
        ) from None
    return event, summary, writer.EventFileWriter

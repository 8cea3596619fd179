"""Where a rank's records go: its own file, and on the writer rank the live line and the exporters."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from paceline.run.directory import RunDirectory
from paceline.run.records import Record, Step
from paceline.telemetry.config import TelemetrySection
from paceline.telemetry.exporters import Exporter, TensorBoardExporter
from paceline.telemetry.line import LiveLine
from paceline.workers.environment import terminal_columns


class RunObserver:
    """Records of one rank in one attempt. Step lines are the writer rank's alone; window summaries are every rank's.

    Args:
        directory: the run's.
        rank: this rank; 0 is the writer.
        steps, start_step, log_every: for the live line.
        telemetry: which exporters.
    """

    def __init__(
        self,
        directory: RunDirectory,
        rank: int,
        *,
        steps: int,
        log_every: int,
        telemetry: TelemetrySection,
        start_step: int = 0,
    ) -> None:
        self._is_writer = rank == 0
        self._records = directory.writer(f"rank{rank}")
        self._line = LiveLine(
            steps, log_every, start_step=start_step, enabled=self._is_writer, columns=terminal_columns()
        )
        self._exporters: list[Exporter] = []
        if self._is_writer and telemetry.tensorboard:
            self._exporters.append(TensorBoardExporter(directory.path / "tensorboard", start_step))

    def step(self, record: Step) -> None:
        """A step is done; other ranks than the writer leave it alone."""
        if not self._is_writer:
            return
        self._records.write(record)
        self._line.update(record)
        for exporter in self._exporters:
            exporter.write(record)

    def write(self, record: Record) -> None:
        """A record of this rank."""
        self._records.write(record)
        for exporter in self._exporters:
            exporter.write(record)

    def say(self, text: str) -> None:
        """A line for people, from the writer rank."""
        self._line.message(text)

    def close(self) -> None:
        self._line.close()
        self._records.close()
        for exporter in self._exporters:
            exporter.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

"""Job: a parsed job file with its overrides, as frozen sections that remember where each value came from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from paceline.checkpoint.config import CheckpointSection
from paceline.config import DEFAULT, Section, Settings, build, layer, parse_override, read_file
from paceline.data.config import DataSection
from paceline.errors import JobError
from paceline.job.checks import check_effects
from paceline.model.config import ModelSection
from paceline.optim.config import OptimizerSection
from paceline.parallel.config import BatchSection, ParallelSection
from paceline.run.config import RunSection
from paceline.telemetry.config import TelemetrySection
from paceline.workers.config import LaunchSection, RecoverySection

SECTIONS: dict[str, type[Section]] = {
    "run": RunSection,
    "model": ModelSection,
    "data": DataSection,
    "batch": BatchSection,
    "optimizer": OptimizerSection,
    "parallel": ParallelSection,
    "checkpoint": CheckpointSection,
    "recovery": RecoverySection,
    "telemetry": TelemetrySection,
    "launch": LaunchSection,
}

LENGTHS = ("run.steps", "run.tokens", "run.epochs")
DEFAULT_NAME = "default"
DEFAULT_STEPS = 1000


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """All sections of a job, and the settings that made them."""

    run: RunSection
    model: ModelSection
    data: DataSection
    batch: BatchSection
    optimizer: OptimizerSection
    parallel: ParallelSection
    checkpoint: CheckpointSection
    recovery: RecoverySection
    telemetry: TelemetrySection
    launch: LaunchSection
    settings: Settings
    path: Path | None = None

    @property
    def name(self) -> str:
        """The run's name: as given, else the job file's stem."""
        return self.run.name or (self.path.stem if self.path else DEFAULT_NAME)

    @property
    def run_path(self) -> Path:
        return Path(self.run.dir) / self.name

    def is_set(self, key: str) -> bool:
        """Whether the user wrote `section.key`, in a file or on the command line."""
        return key in self.settings

    def origin(self, key: str) -> str:
        return self.settings[key].origin if key in self.settings else DEFAULT

    def values(self) -> Iterator[tuple[str, Any]]:
        """Every `section.key` and its value, defaults included."""
        for section in SECTIONS:
            table = getattr(self, section)
            for name in table.__struct_fields__:
                yield f"{section}.{name}", getattr(table, name)


def load_job(path: Path | None, overrides: Sequence[str] = ()) -> Job:
    """The job of a file (or of the defaults) with `section.key=value` overrides on top.

    Raises:
        JobError: the file, a key or a value is wrong, or two of them contradict each other.
    """
    settings: Settings = read_file(path, (LENGTHS,)) if path is not None else {}
    for text in overrides:
        key, setting = parse_override(text)
        settings = layer(settings, {key: setting}, (LENGTHS,))
    return job_of_settings(settings, path)


def job_of_settings(settings: Settings, path: Path | None = None) -> Job:
    """The job of settings that were read before.

    Raises:
        JobError: a key or a value is wrong, or two of them contradict each other.
    """
    sections = build(SECTIONS, settings)
    job = Job(**sections, settings=settings, path=path)  # type: ignore[arg-type]
    check_effects(job.values(), job.is_set)
    return job


def split_words(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Positional words of a command: at most one job file, the rest `section.key=value`."""
    files = [w for w in words if "=" not in w]
    if len(files) > 1:
        raise JobError(
            f"one job file at a time, got {' and '.join(files)}", hint="Overrides are written section.key=value."
        )
    return (Path(files[0]) if files else None), [w for w in words if "=" in w]

"""The exceptions of paceline, drawn as a tree. Each carries an exit code and says what to do next.

    PacelineError            1   failed
    ├── UsageError           2   wrong usage of the command line
    ├── RunHeld             74   another live run holds the directory
    ├── Preempted           75   interrupted, state saved
    ├── Stalled             76   stalled, or hardware suspected
    ├── NoCheckpoint        77   no valid checkpoint where one was required
    ├── JobError            78   the job is wrong, or names what is not there
    │   └── DataError            a source, tokenizer or shard is wrong
    ├── DiskFull            79   no space left
    ├── NoProgress          93   three attempts without a new step
    ├── Interrupted        130   interrupted, nothing saved
    ├── WorkerFailed         1   a worker process ended by itself
    ├── OutOfMemory          1   the device or the host has too little memory
    └── Unreadable           1   a captured host says nothing

The codes are a contract with schedulers: `docs/guide/exit-codes.md`.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing.TYPE_CHECKING without the import, which `--help` cannot afford
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, ClassVar


class PacelineError(Exception):
    """Something the user can act on.

    Args:
        message: one sentence that carries the values and the reason.
        key: the job key or option concerned, e.g. `batch.global_batch`.
        values: the numbers and names in the message, for programs.
        hint: the next command or change, in the imperative.
    """

    exit_code: ClassVar[int] = 1

    def __init__(
        self, message: str, *, key: str | None = None, values: Mapping[str, Any] | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.key = key
        self.values = dict(values or {})
        self.hint = hint

    def __str__(self) -> str:
        head = f"{self.key}: {self.message}" if self.key else self.message
        return f"{head}\n  {self.hint}" if self.hint else head

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.to_record())

    def to_record(self) -> dict[str, Any]:
        """The error as plain data: `kind`, `exit`, `message`, `key`, `values`, `hint`."""
        return {
            "kind": type(self).__name__,
            "exit": self.exit_code,
            "message": self.message,
            "key": self.key,
            "values": self.values,
            "hint": self.hint,
        }


class UsageError(PacelineError):
    """The command line is wrong: an unknown option, a malformed `--cluster`."""

    exit_code = 2


class RunHeld(PacelineError):
    """The run directory belongs to another live run."""

    exit_code = 74


class Preempted(PacelineError):
    """The run was told to stop and saved its state."""

    exit_code = 75


class Stalled(PacelineError):
    """A rank made no progress, or its hardware is suspected."""

    exit_code = 76


class NoCheckpoint(PacelineError):
    """A checkpoint was required and none is valid."""

    exit_code = 77


class JobError(PacelineError):
    """The job contradicts itself, cannot run, or names what is not there or not readable."""

    exit_code = 78


class DataError(JobError):
    """A source, a tokenizer or a shard is missing, empty, damaged or does not match."""


class DiskFull(PacelineError):
    """No space is left where the run must write."""

    exit_code = 79


class NoProgress(PacelineError):
    """Three attempts ended without a new step."""

    exit_code = 93


class Interrupted(PacelineError):
    """The user interrupted the run before anything was saved."""

    exit_code = 130


class WorkerFailed(PacelineError):
    """A worker process ended by an exception of its own or by a signal."""


class OutOfMemory(PacelineError):
    """An allocation failed; the message carries the parts and the cheapest change."""


class Unreadable(PacelineError):
    """A snapshot of a host is of a newer version, cut short, or no snapshot at all."""


def from_record(record: Mapping[str, Any]) -> PacelineError:
    """The error that `PacelineError.to_record` wrote; an unknown kind becomes a plain `PacelineError`."""
    cls = {c.__name__: c for c in _tree(PacelineError)}.get(record.get("kind", ""), PacelineError)
    return _rebuild(cls, record)


def _rebuild(cls: type[PacelineError], record: Mapping[str, Any]) -> PacelineError:
    return cls(record["message"], key=record.get("key"), values=record.get("values"), hint=record.get("hint"))


def _tree(cls: type[PacelineError]) -> list[type[PacelineError]]:
    return [cls, *(leaf for child in cls.__subclasses__() for leaf in _tree(child))]

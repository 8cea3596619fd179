"""The directory of a run: who may write in it, whether it is the same job, and where its things lie.

runs/<name>/
  job.toml        the resolved job, to read
  job.json        the same as data: id of the run and the value of every key, to compare a resumed job with
  plan.json       what was predicted
  lease.json      who holds the directory while the run lives
  records/        what happened (`paceline.run.records`)
  checkpoints/    what can be resumed
  report.html     what it all means
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from paceline.errors import JobError
from paceline.run.files import is_no_space, space_checked, write_atomic
from paceline.run.lease import EXPIRES_SECONDS, Lease, acquire, exclusive, held, read_holder, why_dead
from paceline.run.records import Change, RecordWriter, attempt_of, plain_value, read_records
from paceline.run.secrets import refuse_secrets

LENGTH_KEYS = ("run.steps", "run.tokens", "run.epochs")
LEASE_FILE = "lease.json"
_NOT_SET = "(not set)"


class StoredJob(msgspec.Struct, frozen=True, kw_only=True):
    """`job.json`: the identity of a run and what it was asked to do; `digest` is over the values."""

    run_id: str
    digest: str
    values: dict[str, Any]


class RunDirectory:
    """A run's directory, held by this process until `release` (or, from `attach`, held by its parent).

    Attributes:
        path: the directory.
        run_id: the same in all attempts.
        job_digest: sha256 over the resolved values.
        attempt: number of this attempt, from 1.
        changes: keys that differ from the attempts before, for the record.
        notes: sentences to print, such as that a dead run's lease was taken over.
        finished: the `run_finished` record of a run that is done and was not made longer; nothing is held then.
    """

    def __init__(self, path: Path, job: StoredJob, attempt: int) -> None:
        self.path = path
        self.run_id = job.run_id
        self.job_digest = job.digest
        self.attempt = attempt
        self.changes: list[Change] = []
        self.notes: list[str] = []
        self.finished: dict[str, Any] | None = None
        self._lease: Lease | None = None

    @classmethod
    def open(
        cls,
        path: Path,
        job_toml_text: str,
        job_values: Mapping[str, Any],
        may_change: Callable[[str], bool],
        *,
        expires_seconds: float = EXPIRES_SECONDS,
    ) -> Self:
        """Create the directory, or continue the run in it.

        Args:
            path: `run.dir`/`run.name`.
            job_toml_text: the resolved job as TOML, written to `job.toml`.
            job_values: every resolved key, dotted; what the job is compared by.
            may_change: whether a resumed run may have another value for this dotted key.
            expires_seconds: silence after which a holder on another host is dead.

        Raises:
            RunHeld: another live run holds it.
            JobError: it belongs to another job (the difference in the message), or cannot be written.
            DiskFull: no space.
        """
        refuse_secrets(job_values)
        values = _plain_values(job_values)
        with _usable(path):
            _make_folders(path)
            with exclusive(path / ".lock"):
                return cls._take(path, job_toml_text, values, may_change, expires_seconds)

    @classmethod
    def attach(cls, path: Path, attempt: int) -> Self:
        """The directory as a worker of the run sees it: its parent holds the lease.

        Raises:
            JobError: there is no run at `path`.
        """
        job = stored_job(path)
        if job is None:
            raise JobError(f"there is no run in {path}", key="run.dir", values={"directory": str(path)})
        return cls(path, job, attempt)

    @property
    def job_file(self) -> Path:
        return self.path / "job.toml"

    @property
    def plan_file(self) -> Path:
        return self.path / "plan.json"

    @property
    def report_file(self) -> Path:
        return self.path / "report.html"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def writer(self, name: str = "rank0") -> RecordWriter:
        """A record writer for the present attempt; `name` tells writers of one attempt apart."""
        return RecordWriter(self.path, self.attempt, name=name)

    def next_attempt(self) -> int:
        """Count one attempt more: the supervisor starts the workers anew under the same lease."""
        self.attempt += 1
        if self._lease is not None:
            self._lease.renew(self.attempt)
        return self.attempt

    def check_held(self) -> None:
        """Make sure that nobody took the directory meanwhile.

        Raises:
            RunHeld: another host took it after our heartbeat had stopped for too long.
        """
        if self._lease is not None and not self._lease.is_ours():
            self._raise_holder(self._lease.path)

    def check_beat(self) -> None:
        """The same as the last heartbeat found it, at no cost: for loops that look often.

        Raises:
            RunHeld: see `check_held`.
        """
        if self._lease is not None and self._lease.lost:
            self._raise_holder(self._lease.path)

    def check_attempt(self) -> None:
        """In a worker, before it saves: make sure that no later attempt goes on elsewhere.

        Raises:
            RunHeld: another host took the directory while this one's supervisor gave no sign of life.
        """
        found = read_holder(self.path / LEASE_FILE)
        if found is not None and found.attempt > self.attempt:
            raise held(self.path / LEASE_FILE, found)

    @staticmethod
    def _raise_holder(path: Path) -> None:
        found = read_holder(path)
        if found is not None:
            raise held(path, found)

    def release(self) -> None:
        """Give the directory back. Releasing twice is harmless."""
        if self._lease is not None:
            self._lease.release()
            self._lease = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    @classmethod
    def _take(
        cls,
        path: Path,
        text: str,
        values: dict[str, Any],
        may_change: Callable[[str], bool],
        expires_seconds: float,
    ) -> Self:
        stored = stored_job(path)
        changes = _differences(stored.values, values) if stored else []
        _refuse_other_job(path, [change for change in changes if not may_change(change.key)])
        job = StoredJob(
            run_id=stored.run_id if stored else os.urandom(4).hex(), digest=job_digest(values), values=values
        )
        lease_path = path / LEASE_FILE
        holder = read_holder(lease_path)
        if holder is not None and why_dead(lease_path, holder, expires_seconds) is None:
            raise held(lease_path, holder)
        run = cls(path, job, last_attempt(path) + 1)
        run.finished = None if any(c.key in LENGTH_KEYS for c in changes) else finished_record(path)
        if run.finished is not None:
            run.attempt = int(run.finished["attempt"])
            return run
        run._lease, taken = acquire(lease_path, run.attempt, expires_seconds=expires_seconds)
        run.attempt = run._lease.holder.attempt
        run.changes = changes
        run.notes = [taken] if taken else []
        if stored is None or changes:
            write_atomic(path / "job.toml", text)
            write_atomic(path / "job.json", msgspec.json.encode(job) + b"\n")
        return run


def job_digest(values: Mapping[str, Any]) -> str:
    """sha256 over the resolved values, independent of their order."""
    return hashlib.sha256(msgspec.json.encode(_plain_values(values))).hexdigest()


def next_free_name(folder: Path, name: str) -> str:
    """`name`, or the first of `name-2`, `name-3`, ... that does not exist in `folder`."""
    count, free = 1, name
    while os.path.lexists(Path(folder) / free):
        count += 1
        free = f"{name}-{count}"
    return free


def stored_job(path: Path) -> StoredJob | None:
    """The job that a run directory belongs to; None where there is none yet.

    Raises:
        JobError: `job.json` is damaged.
    """
    file = Path(path) / "job.json"
    try:
        return msgspec.json.decode(file.read_bytes(), type=StoredJob)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except msgspec.DecodeError as error:
        raise JobError(
            f"{file} is damaged: {error}", values={"file": str(file)}, hint="Give this run another run.name."
        ) from None


def last_attempt(path: Path) -> int:
    """The highest attempt that left a record; 0 for a fresh run."""
    return max((attempt_of(file) for file in (Path(path) / "records").glob("*.jsonl")), default=0)


def finished_record(path: Path) -> dict[str, Any] | None:
    """The `run_finished` record with exit 0 of the last attempt; None while the run is not done."""
    last = None
    for record in read_records(path, kinds=("run_finished",)):
        last = record
    done = last is not None and last["exit"] == 0 and last["attempt"] == last_attempt(path)
    return last if done else None


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    keys = sorted({*old, *new})
    pairs = [(key, old.get(key, _NOT_SET), new.get(key, _NOT_SET)) for key in keys]
    return [Change(step=0, key=key, old=before, new=after) for key, before, after in pairs if before != after]


def _refuse_other_job(path: Path, refused: list[Change]) -> None:
    if not refused:
        return
    lines = "".join(f"\n  {c.key}: {_shown(c.old)} -> {_shown(c.new)}" for c in refused)
    keys = ", ".join(f'"{c.key}"' for c in refused)
    raise JobError(
        f"{path} holds a run of a different job; these keys differ:{lines}",
        key=refused[0].key,
        values={
            "directory": str(path),
            "differences": [{"key": c.key, "old": c.old, "new": c.new} for c in refused],
        },
        hint="Give another run.name, start beside it with checkpoint.resume=never, "
        f"or allow it with checkpoint.allow_change=[{keys}].",
    )


def _shown(value: Any) -> str:
    return value if value == _NOT_SET else msgspec.json.encode(value).decode()


def _plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Resolved values as JSON has them, in the order of their keys: what is stored and compared."""
    plain = {key: msgspec.to_builtins(values[key], enc_hook=plain_value) for key in sorted(values)}
    decoded: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(plain))
    return decoded


def _make_folders(path: Path) -> None:
    (path / "records").mkdir(parents=True, exist_ok=True)
    (path / "checkpoints").mkdir(exist_ok=True)


@contextlib.contextmanager
def _usable(path: Path) -> Iterator[None]:
    """Turn what an operating system says about a folder that cannot be used into a JobError or DiskFull."""
    try:
        with space_checked(path):
            yield
    except OSError as error:
        if is_no_space(error):
            raise
        reason = f"{error.strerror}: {error.filename}" if error.filename else str(error)
        raise JobError(
            f"cannot use {path} as the run directory: {reason}",
            key="run.dir",
            values={"directory": str(path), "errno": error.errno},
            hint="Point run.dir at a folder that you may write, or give another run.name.",
        ) from None

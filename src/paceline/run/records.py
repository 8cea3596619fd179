"""What a run writes down while it goes on, and how it is read back: one JSON object a line in `records/*.jsonl`.

Every line begins with `kind`, `time` (seconds since the epoch), `attempt` and `step` (optimizer steps done), then the
fields of its kind below. JSON has no NaN and no infinity: such a value is written as null, and `nonfinite` on the same
line says what it was, as `{"loss": "nan"}`. A reader skips kinds and fields that it does not know.

Each writer has a file of its own per attempt, so a line is torn only where the machine died or the disk was full while
it was written; the reader skips such a line and says so.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import msgspec

from paceline.run.files import disk_full, is_no_space, space_checked

SCHEMA = 1
"""Version of the record kinds; it grows when a field changes its meaning."""

PARTS = ("data_wait", "forward", "backward", "bubble", "reduce_exposed", "optimizer", "telemetry", "other")
"""The parts of a step in the order in which they are shown. They add up to the step's seconds."""


class Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """A line of the record. `step` is the number of optimizer steps done when it was written."""

    step: int


class Derivation(msgspec.Struct, frozen=True):
    """A value that the product derived, with its formula in numbers."""

    key: str
    value: Any
    formula: str


class Summary(msgspec.Struct, frozen=True):
    """Seconds of one part over a window of steps, and the step in which it took longest."""

    count: int
    sum: float
    min: float
    max: float
    worst_step: int


class RunStarted(Record, frozen=True, kw_only=True, tag="run_started"):
    """An attempt begins. `step` and `samples` say from where: 0 for a fresh run.

    `launched` is the time (seconds since the epoch) at which the command was given, so that start-up can be accounted
    for. `peak_flop_per_second` is the measured matmul peak of one rank, None where it was not measured.
    """

    run_id: str
    job_digest: str
    world_size: int
    layout: dict[str, int | str]
    device: str
    precision: str
    compile: bool
    microbatch: int
    accumulation: int
    global_batch: int
    sequence_length: int
    parameters: int
    flop_per_token: float
    flop_convention: str
    peak_flop_per_second: float | None = None
    weights_hash: str | None = None
    versions: dict[str, str] = {}
    host: str = ""
    threads_per_rank: int | None = None
    planned_memory: dict[str, int] = {}
    derivations: list[Derivation] = []
    launched: float | None = None
    samples: int = 0
    schema: int = SCHEMA


class Step(Record, frozen=True, kw_only=True, tag="step"):
    """One optimizer step, seen by the writer rank.

    `loss` is the objective: sum over all ranks divided by weight over all ranks. `grad_norm` is that of the whole model
    before clipping. `tokens` are those of this step over all ranks, `samples` those consumed since the run began.
    `parts` holds seconds by name (`PARTS`); it is empty where they were not measured in this step.
    """

    loss: float | None
    grad_norm: float | None
    lr: float
    tokens: int
    seconds: float
    tokens_per_second: float
    mfu: float | None
    samples: int
    skipped: bool = False
    parts: dict[str, float] = {}


class Window(Record, frozen=True, kw_only=True, tag="window"):
    """Parts of the steps `first_step`..`step` on one rank.

    `own`: of the parts in which the rank waited for others, the same without these waits. `cpu_seconds`: processor time of
    the rank's process since the window before, over all of its threads; `held_back_seconds`: in which a CPU quota of its own
    had it stand still. `probe_seconds`: of a small product of matrices, the
    same on all ranks. `address`: the rank's own in its connections; `links`: what it sent since the window before, by the
    other end's address, as [bytes, seconds of being busy with it].
    """

    first_step: int
    rank: int
    host: str = ""
    parts: dict[str, Summary]
    own: dict[str, Summary] = {}
    cpu_seconds: float | None = None
    held_back_seconds: float | None = None
    probe_seconds: float | None = None
    address: str = ""
    links: dict[str, list[float]] = {}


class Eval(Record, frozen=True, kw_only=True, tag="eval"):
    """One evaluation: `loss` is the sum over all samples divided by `weight`."""

    name: str
    loss: float | None
    weight: float
    seconds: float


class Checkpoint(Record, frozen=True, kw_only=True, tag="checkpoint"):
    """What became of a checkpoint; `step` is the one it holds.

    A save is requested, staged (the state is copied) and durable (complete on its medium), or failed; skipped where one
    was due while the one before was being written. Later a checkpoint is removed (by the rule of what to keep),
    quarantined (found damaged and set aside), or resumed (an attempt begins from it). `seconds` count from the request.
    `blocked_seconds` are those of this phase in which training stood still; None where the writer does not know.
    `reason` says why, where there is a why.
    """

    state: Literal["requested", "staged", "durable", "failed", "skipped", "removed", "quarantined", "resumed"]
    path: str
    bytes: int | None = None
    seconds: float = 0.0
    blocked_seconds: float | None = None
    reason: str | None = None


class Certificate(Record, frozen=True, kw_only=True, tag="certificate"):
    """The first step after a resume beside what the run that wrote the checkpoint had at the same step.

    `verdict`: exact (equal bit for bit), close (within `tolerance`, relative; what another layout gives), different, or
    unknown (the checkpoint was a run's last, so that there was no next step to store).
    """

    resumed_step: int
    same_layout: bool
    expected_loss: float | None
    loss: float | None
    expected_grad_norm: float | None
    grad_norm: float | None
    tolerance: float
    verdict: Literal["exact", "close", "different", "unknown"]


class Samples(Record, frozen=True, kw_only=True, tag="samples"):
    """The samples of one optimizer step over all ranks, by number in rising order (`run.record_samples`)."""

    ids: list[int]


class Fault(Record, frozen=True, kw_only=True, tag="fault"):
    """Something broke on `rank` of `host`; `evidence` is what shows it."""

    rank: int | None
    host: str
    kind_of_fault: str
    evidence: str
    message: str


class Restart(Record, frozen=True, kw_only=True, tag="restart"):
    """The supervisor starts the workers anew after `reason`; `seconds` from the fault to the new start."""

    reason: str
    next_attempt: int
    seconds: float | None = None


class Straggler(Record, frozen=True, kw_only=True, tag="straggler"):
    """`rank` is slower than its peers by `ratio` (its own work over their median) because of `cause`.

    Of a slow link `ratio` is what all ranks wait over what they waited before; `rank` is None where none can be named.
    """

    rank: int | None
    host: str
    cause: str
    ratio: float
    evidence: str


class Change(Record, frozen=True, kw_only=True, tag="change"):
    """A key of the job that is not what the attempts before had."""

    key: str
    old: Any
    new: Any


class RunFinished(Record, frozen=True, kw_only=True, tag="run_finished"):
    """An attempt ends with a verdict. `exit` is the exit code of the command, `reason` a sentence.

    `tokens` and `seconds` are those of this attempt, `tokens_per_second` and `mfu` its means without the first step.
    `peak_memory_bytes` has one entry per rank.
    """

    exit: int
    reason: str
    steps: int
    samples: int
    loss: float | None = None
    eval_loss: float | None = None
    bigram_eval_loss: float | None = None
    tokens: int = 0
    seconds: float = 0.0
    tokens_per_second: float | None = None
    mfu: float | None = None
    peak_memory_bytes: list[int] = []
    recompiles: int | None = None


KINDS: dict[str, type[Record]] = {
    str(cls.__struct_config__.tag): cls
    for cls in (
        *(RunStarted, Step, Window, Eval, Checkpoint, Certificate, Samples),
        *(Fault, Restart, Straggler, Change, RunFinished),
    )
}


class RecordWriter:
    """Appends records of one attempt to a file of its own in `run_dir/records`, each by one write system call.

    A process that is killed leaves whole lines. `close` makes them survive a power cut.

    Args:
        directory: the run directory.
        attempt: number of the attempt, from 1.
        clock: seconds since the epoch.
        name: the writer, for example `rank0` or `supervisor`; a part of the file's name.

    Raises:
        DiskFull: no space left, from the constructor and from `write`.
    """

    def __init__(
        self, directory: Path, attempt: int, clock: Callable[[], float] = time.time, name: str = "rank0"
    ) -> None:
        folder = Path(directory) / "records"
        self.path = folder / f"attempt-{attempt:04d}-{name}.jsonl"
        self._attempt = attempt
        self._clock = clock
        self._encode = msgspec.json.Encoder(enc_hook=plain_value).encode
        self._torn = False
        with space_checked(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def write(self, record: Record) -> None:
        """Append one line."""
        line = self._line(record)
        try:
            written = os.write(self._file, b"\n" + line if self._torn else line)
        except OSError as error:
            if is_no_space(error):
                raise disk_full(self.path.parent, len(line), error) from None
            raise
        self._torn = written < len(line)
        if self._torn:
            self.write(record)

    def close(self) -> None:
        """Flush to the medium and close. Closing twice is harmless."""
        if self._file >= 0:
            os.fsync(self._file)
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _line(self, record: Record) -> bytes:
        encoded = self._encode(record)
        head = encoded.index(b",")  # after `{"kind":"step"`
        tail = encoded[head:-1]
        if b":null" in encoded or b"[null" in encoded or b",null" in encoded:
            lost = _nonfinite(msgspec.to_builtins(record, enc_hook=plain_value))
            if lost:
                tail += b',"nonfinite":' + self._encode(lost)
        return encoded[:head] + b',"time":%.6f,"attempt":%d' % (self._clock(), self._attempt) + tail + b"}\n"


def read_records(
    run_dir: Path, *, kinds: Iterable[str] | None = None, torn: list[str] | None = None
) -> Iterator[dict[str, Any]]:
    """The records of a run, attempt after attempt, each attempt in the order of its clock.

    Args:
        run_dir: the run directory; one without records gives nothing.
        kinds: yield these alone (others are not even decoded).
        torn: receives a sentence for every line that is no whole JSON object.
    """
    wanted = set(KINDS if kinds is None else kinds)
    attempts: dict[int, list[Path]] = {}
    for path in sorted((Path(run_dir) / "records").glob("*.jsonl")):
        attempts.setdefault(attempt_of(path), []).append(path)
    for _, paths in sorted(attempts.items()):
        records = [record for path in paths for record in _read_file(path, wanted, torn)]
        yield from sorted(records, key=lambda record: float(record.get("time", 0.0)))


def latest_steps(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each step once, rising: what the run's present state is made of.

    Where an attempt began at step s, the steps after s of the attempts before it are void, whether or not they have
    been done again yet.
    """
    return sorted(_split_steps(records)[0], key=lambda record: int(record["step"]))


def redone(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The `step` records whose work was lost: an attempt that came later began before them."""
    return _split_steps(records)[1]


def json_safe(value: Any) -> Any:
    """The value in what JSON has: NaN and infinities as null, sizes, paths, tuples and sets as plain values."""
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [json_safe(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, msgspec.Struct):
        return json_safe(msgspec.to_builtins(value, enc_hook=plain_value))
    return plain_value(value)


def attempt_of(path: Path) -> int:
    """The attempt that a record file belongs to, by its name; 0 for a foreign name."""
    match = re.match(r"attempt-(\d+)", path.name)
    return int(match[1]) if match else 0


def _split_steps(records: Iterable[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    kept: dict[int, dict[str, Any]] = {}
    lost: list[dict[str, Any]] = []
    for record in records:
        if record["kind"] == "run_started":
            lost += [kept.pop(step) for step in sorted(kept) if step > record["step"]]
        elif record["kind"] == "step":
            before = kept.pop(record["step"], None)
            lost += [] if before is None else [before]
            kept[record["step"]] = record
    return list(kept.values()), lost


def _read_file(path: Path, wanted: set[str], torn: list[str] | None) -> Iterator[dict[str, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip() or not _may_be(line, wanted):
                continue
            try:
                record = msgspec.json.decode(line)
            except msgspec.DecodeError:
                if torn is not None:
                    torn.append(f"{path.name} line {number} is torn after {len(line)} bytes and was skipped")
                continue
            if isinstance(record, dict) and record.get("kind") in wanted:
                yield record


def _may_be(line: bytes, wanted: set[str]) -> bool:
    """Whether the line may hold a wanted kind; false only where another kind stands first, as written here."""
    if not line.endswith(b"}\n"):
        return True
    match = re.match(rb'\{"kind":"(\w+)"', line)
    return match is None or match[1].decode() in wanted


def _nonfinite(value: Any, name: str = "") -> dict[str, str]:
    if isinstance(value, float) and not math.isfinite(value):
        return {name: "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"}
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list):
        inner = enumerate(value)
    return {k: v for key, item in inner for k, v in _nonfinite(item, f"{name}.{key}" if name else str(key)).items()}


def plain_value(value: Any) -> Any:
    """Sizes, paths and one-element arrays as plain JSON values."""
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):
        return value.item()
    raise NotImplementedError(f"a {type(value).__name__} cannot stand in a record")

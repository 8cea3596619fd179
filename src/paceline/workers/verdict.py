"""How a worker says, before it exits, why: one JSON file per rank that the supervisor reads.

torchrun turns every failure into exit code 1 and prints no order in time; the verdict keeps both.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, NoReturn

from paceline import errors
from paceline.workers import environment, heartbeat, recorder

ENDING_SECONDS = 60.0
"""From the verdict to the end of the process."""

Cause = Literal["own", "timeout", "consequence"]

# What a rank sees when another one has gone, in the words of Gloo, the store and NCCL.
_CONSEQUENCE = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|caused pair closure|Connection refused"
    r"|failed to recv, got 0 bytes|remote process exited|NCCL communicator was aborted"
    r"|recvValue failed|sendBytes failed"
)
_TIMEOUT = re.compile(
    r"Timed out waiting \d+ms for (?:recv|send) operation|Watchdog caught collective operation timeout"
    r"|timed out after \d+ms|wait timeout after|Socket Timeout|Timeout waiting for key"
)
_LEADING = (Path(__file__), Path(__file__).with_name("boot.py"))


class Verdict(NamedTuple):
    """Why a worker ended. `time` is seconds since 1970, `monotonic` the host's own clock; `where` is `file:line`."""

    rank: int
    host: str
    time: float
    monotonic: float
    exit: int
    cause: Cause = "own"
    error: dict[str, Any] | None = None
    traceback: str | None = None
    step: int = -1
    phase: str = ""
    where: str | None = None
    collective: str | None = None
    seen: dict[str, Any] | None = None
    """The collectives that the rank had entered (`recorder.Seen`), where an error of the engine ended it."""


def write_verdict(exit_code: int, error: BaseException | None = None, *, rank: int | None = None) -> None:
    """Leave this worker's verdict for the supervisor; the first one stands. No-op without a supervisor.

    Args:
        error: what made the worker fail. A `PacelineError` is kept as it is, without its traceback.
    """
    folder = environment.folder()
    if folder is None:
        return
    rank = environment.ranks().rank if rank is None else rank
    path = verdict_path(folder, rank)
    if path.exists():
        return
    part = path.with_suffix(".part")
    part.write_text(json.dumps(_verdict(rank, exit_code, error)._asdict(), default=str), encoding="utf-8")
    part.replace(path)
    # Tearing down takes a while, without a beat and with the pulse already gone.
    heartbeat.beat(*heartbeat.last(), ENDING_SECONDS, "save")


def reported(main: Callable[[], int]) -> int:
    """Run a worker's `main`; its exit code, with a verdict left for the supervisor.

    An exception ends the process here. Without a supervisor it passes through, so that the command line prints it.
    """
    try:
        code = main()
    except (Exception, KeyboardInterrupt) as error:
        if not environment.is_supervised():
            raise
        code = exit_code_of(error)
        write_verdict(code, error)
        leave_now(code)
    write_verdict(code)
    return code


def leave_now(code: int) -> NoReturn:
    """Exit without the destructors of a process group, which may wait for ranks that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def exit_code_of(error: BaseException) -> int:
    """The exit code of `docs/guide/exit-codes.md` for an exception."""
    if isinstance(error, errors.PacelineError):
        return error.exit_code
    return errors.Interrupted.exit_code if isinstance(error, KeyboardInterrupt) else 1


def read_verdicts(folder: Path) -> dict[int, Verdict]:
    """The verdicts written so far, by rank."""
    found = {}
    for path in folder.glob("rank-*.verdict.json"):
        try:
            verdict = Verdict(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            continue
        found[verdict.rank] = verdict
    return found


def verdict_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.verdict.json"


def cause_of(error: BaseException) -> Cause:
    """Whether an exception is a failure of its own, a collective that timed out, or the echo of another rank's end."""
    if isinstance(error, errors.PacelineError):
        return "timeout" if isinstance(error, errors.Stalled) else "own"
    text = str(error)
    if _TIMEOUT.search(text):
        return "timeout"
    return "consequence" if _CONSEQUENCE.search(text) else "own"


def error_of(verdict: Verdict) -> errors.PacelineError | None:
    """The `PacelineError` that the worker raised, or None where it raised another exception or none."""
    return errors.from_record(verdict.error) if verdict.error is not None and "exit" in verdict.error else None


def is_plain(verdict: Verdict) -> bool:
    """Whether the worker raised a `PacelineError` of no particular kind: what it found, the others may find as well."""
    return verdict.error is not None and verdict.error.get("kind") == errors.PacelineError.__name__


def _verdict(rank: int, exit_code: int, error: BaseException | None) -> Verdict:
    step, phase = heartbeat.last()
    base = Verdict(rank, socket.gethostname(), time.time(), time.monotonic(), exit_code, step=step, phase=phase)
    if error is None:
        return base
    if isinstance(error, errors.PacelineError):
        return base._replace(error=_plain(error.to_record()), cause=cause_of(error), where=where(error))
    return base._replace(
        error={"kind": type(error).__name__, "message": str(error)},
        cause=cause_of(error),
        traceback="".join(traceback.format_exception(type(error), error, _from_user_code(error))),
        where=where(error),
        collective=recorder.last_entered() if cause_of(error) != "own" else None,
        seen=_seen(error),
    )


def _from_user_code(error: BaseException) -> TracebackType | None:
    """The traceback without the frames at its start that only lead into the worker's module."""
    found = error.__traceback__
    while found is not None and found.tb_next is not None:
        file = found.tb_frame.f_code.co_filename
        if not file.startswith("<") and Path(file) not in _LEADING:
            break
        found = found.tb_next
    return found


def where(error: BaseException) -> str | None:
    """`file:line` of the innermost frame outside of installed packages, where the user looks first."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [(file, line) for file, line in frames if "site-packages" not in file and not file.startswith("<")]
    if not own:
        return None
    file, line = own[-1]
    return f"{file}:{line}"


def _plain(record: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(record, default=str))  # type: ignore[no-any-return]


def _seen(error: BaseException) -> dict[str, Any] | None:
    found = recorder.seen() if cause_of(error) != "own" or "gloo" in str(error) else None
    return found.to_plain() if found is not None else None

"""`paceline stop` and `paceline save`: make a request of a live run and wait until it has been met."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.errors import JobError, PacelineError
from paceline.run import control
from paceline.run.directory import stored_job
from paceline.run.lease import Holder, read_holder, why_dead
from paceline.run.records import read_records
from paceline.units import format_seconds

LOOK_SECONDS = 0.1
SETTLED = ("durable", "failed")


def request_stop(path: Path, *, wait: bool, limit_seconds: float | None, say: Callable[[str], None]) -> dict[str, Any]:
    """Have the run in `path` save and end.

    Args:
        wait: until it has ended; else return once it has been asked.
        limit_seconds: longest wait; None for none. The request stands after it.
        say: told what is waited for.

    Returns:
        `run_dir`, `asked`, `ended` (False where nothing was waited for), `step`, `run_exit`, `reason`, `seconds`.

    Raises:
        JobError: there is no run, or its folder of requests cannot be written.
        PacelineError: it is not live, did not end in time, or ended by something else than the request.
    """
    holder, began = _live(path), time.monotonic()
    control.ask(path, control.STOP)
    answer = {"run_dir": str(path), "asked": "stop", "ended": False, "step": None, "run_exit": None, "reason": None}
    if wait:
        say(f"asked {_who(holder)} to stop; waiting until it has saved")
        _until(lambda: _gone(path, holder), path, limit_seconds, began, "ended")
        control.withdraw(path, control.STOP)
        last = _last(path, "run_finished", holder.attempt) or {}
        answer |= {"ended": True, "step": last.get("step"), "run_exit": last.get("exit"), "reason": last.get("reason")}
        if last.get("exit") not in (0, 75):
            raise PacelineError(
                f"{path} ended without a save of its last step: {last.get('reason', 'it left no word')}",
                values={"run_dir": str(path), "run_exit": last.get("exit")},
                hint="The command that started it says more; given again, it goes on from the last checkpoint.",
            )
    return {**answer, "seconds": time.monotonic() - began}


def request_save(path: Path, *, wait: bool, limit_seconds: float | None, say: Callable[[str], None]) -> dict[str, Any]:
    """Have the run in `path` save after its present step and go on; arguments and errors as `request_stop`.

    Returns:
        `run_dir`, `asked`, `saved` (False where nothing was waited for), `step`, `path` of the checkpoint, `seconds`.
    """
    holder, began = _live(path), time.monotonic()
    before = len(_saves(path))
    file = control.ask(path, control.SAVE)
    answer = {"run_dir": str(path), "asked": "save", "saved": False, "step": None, "path": None}
    if wait:
        say(f"asked {_who(holder)} to save; waiting until the checkpoint is durable")
        _until(lambda: not file.exists() or _gone(path, holder), path, limit_seconds, began, "saved")
        control.withdraw(path, control.SAVE)
        last = (_saves(path)[before:] or [{}])[-1]
        if last.get("state") != "durable":
            raise PacelineError(
                f"{path} did not save: {last.get('reason') or 'the run ended before it came to it'}",
                values={"run_dir": str(path), "step": last.get("step")},
                hint=f"See what stands there with paceline checkpoint list {path}.",
            )
        answer |= {"saved": True, "step": last["step"], "path": last["path"]}
    return {**answer, "seconds": time.monotonic() - began}


def _live(path: Path) -> Holder:
    """Who runs it.

    Raises:
        JobError: there is no run.
        PacelineError: it is not live.
    """
    if stored_job(path) is None:
        raise JobError(
            f"there is no run in {path}",
            key="run.dir",
            values={"directory": str(path)},
            hint="Name the run's own folder, such as runs/tiny.",
        )
    lease = path / "lease.json"
    holder = read_holder(lease)
    reason = "nobody holds it" if holder is None else why_dead(lease, holder)
    if holder is not None and reason is None:
        return holder
    last = _last(path, "run_finished", 0)
    ended = f"; it ended after step {last['step']} with exit code {last['exit']}" if last is not None else ""
    raise PacelineError(
        f"{path} is not live: {reason}{ended}",
        values={"directory": str(path), "last_exit": last and last["exit"]},
        hint="There is nothing to ask of it; the command that started it goes on with it.",
    )


def _gone(path: Path, holder: Holder) -> bool:
    lease = path / "lease.json"
    found = read_holder(lease)
    return found is None or found.token != holder.token or why_dead(lease, found) is not None


def _until(done: Callable[[], bool], path: Path, limit: float | None, began: float, what: str) -> None:
    while not done():
        if limit is not None and time.monotonic() - began > limit:
            raise PacelineError(
                f"{path} has not {what} after {format_seconds(limit)}; it is still asked to",
                values={"run_dir": str(path), "seconds": limit},
                hint="Its own output says what it does; a step or an evaluation ends before a request is met.",
            )
        time.sleep(LOOK_SECONDS)


def _who(holder: Holder) -> str:
    return f"pid {holder.pid} on {holder.host}"


def _saves(path: Path) -> list[dict[str, Any]]:
    return [r for r in read_records(path, kinds=("checkpoint",)) if r["state"] in SETTLED]


def _last(path: Path, kind: str, first_attempt: int) -> dict[str, Any] | None:
    found = [r for r in read_records(path, kinds=(kind,)) if r["attempt"] >= first_attempt]
    return found[-1] if found else None

"""A run beside the user's own: to its end, or killed once a checkpoint is durable; and a copy of it to go on from."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from paceline.checkpoint.folders import step_folder, step_of
from paceline.checkpoint.manifest import COMMIT_FILE
from paceline.errors import PacelineError, from_record
from paceline.run.directory import finished_record
from paceline.workers.processes import kill_all, started

_POLL_SECONDS = 0.005
_TAIL_LINES = 12


class Ended(NamedTuple):
    """How a command ended.

    code: its exit code; negative for a signal, None where it was ended here at its time limit. document: its JSON.
    began: seconds since 1970. killed: processes that were ended here.
    """

    name: str
    code: int | None
    document: dict[str, Any] | None
    log: Path
    began: float
    seconds: float
    killed: int = 0

    def failure(self) -> PacelineError:
        """What it came to, as an error with its exit code and where its output is."""
        return _failure(self.name, self.code, self.document, self.log)


def run_once(
    run_dir: Path,
    words: Sequence[str],
    *,
    part: str = "",
    module: str = "paceline",
    env: Mapping[str, str] | None = None,
    limit_seconds: float | None = None,
) -> Ended:
    """`paceline train` in `run_dir`, whatever it comes to. What it prints goes into `<run_dir><part>.log`.

    Args:
        module: run instead of `paceline`, with the same words.
        env: variables beside those of this process.
        limit_seconds: it is ended with all its processes where it takes longer.
    """
    out, log = _outputs(run_dir, part)
    began, clock, killed = time.time(), time.monotonic(), 0
    with started(_train(run_dir, words), out, log, module=module, env=env) as process:
        try:
            code: int | None = process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            code, killed = None, kill_all(process)
    return Ended(run_dir.name, code, _document(out), log, began, time.monotonic() - clock, killed)


def run_to_end(run_dir: Path, words: Sequence[str]) -> dict[str, Any]:
    """`paceline train` in `run_dir`; returns its summary. What it prints goes into `<run_dir>.log`.

    Raises:
        PacelineError: what it came to, with its exit code.
    """
    ended = run_once(run_dir, words)
    if ended.code != 0 or ended.document is None:
        raise ended.failure()
    return ended.document


def run_until_killed(
    run_dir: Path, words: Sequence[str], ready: Callable[[], bool], *, env: Mapping[str, str] | None = None
) -> int:
    """`paceline train` in `run_dir`, SIGKILLed with all its processes once it is `ready`: see `is_durable`.

    Args:
        env: variables beside those of this process.

    Returns:
        How many processes there were; 0 where the run was done before the kill reached it.

    Raises:
        PacelineError: it ended before that.
    """
    out, log = _outputs(run_dir)
    with started(_train(run_dir, words), out, log, env=env) as process:
        was_ready = _wait_until(ready, process)
        killed = kill_all(process) if process.poll() is None else 0
    if not was_ready:
        raise _failure(run_dir.name, process.returncode, _document(out), log)
    return 0 if finished_record(run_dir) is not None else killed


def is_durable(run_dir: Path, step: int) -> bool:
    """Whether the checkpoint of `step` is committed."""
    return (run_dir / "checkpoints" / step_folder(step) / COMMIT_FILE).exists()


def copy_run(source: Path, target: Path, step: int) -> None:
    """Copy a killed run as it was with its checkpoint of `step` for the newest one. Checkpoints are linked, not copied."""

    def later(folder: str, names: list[str]) -> list[str]:
        return [n for n in names if (found := step_of(n)) is not None and found > step]

    shutil.copytree(source, target, symlinks=True, ignore=later, copy_function=_copy)


def _copy(source: str, target: str) -> str:
    """A hard link where a file is never written again and the file system can."""
    if step_of(Path(source).parent.name) is not None:
        try:
            os.link(source, target, follow_symlinks=False)
        except OSError:
            pass
        else:
            return target
    return str(shutil.copy2(source, target, follow_symlinks=False))


def _wait_until(ready: Callable[[], bool], process: subprocess.Popen[bytes]) -> bool:
    while not ready():
        if process.poll() is not None:
            return ready()
        time.sleep(_POLL_SECONDS)
    return True


def _train(run_dir: Path, words: Sequence[str]) -> list[str]:
    return ["train", *words, f"run.name={json.dumps(run_dir.name)}", "--json"]


def _outputs(run_dir: Path, part: str = "") -> tuple[Path, Path]:
    return run_dir.with_name(f"{run_dir.name}{part}.json"), run_dir.with_name(f"{run_dir.name}{part}.log")


def _document(out: Path) -> dict[str, Any] | None:
    try:
        document = json.loads(out.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None


def _failure(name: str, code: int | None, document: dict[str, Any] | None, log: Path) -> PacelineError:
    """The error of a run that failed, as it told it, with its exit code and where its output is."""
    told = (document or {}).get("error")
    if told:
        error = from_record({**told, "hint": told.get("next")})
        error.message = f"the run {name!r} beside the job ended with exit code {code}: {error.message}"
        error.values |= {"run": name, "exit": code, "log": str(log)}
        return error
    tail = "\n  ".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:])
    return PacelineError(
        f"the run {name!r} beside the job ended with exit code {code} and without a verdict; its last lines:\n  {tail}",
        values={"run": name, "exit": code, "log": str(log)},
        hint=f"All that it printed is in {log}.",
    )

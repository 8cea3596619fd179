"""One run of a proof: to its end, or killed once a checkpoint is durable; and a copy of its folder to go on from."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.checkpoint.folders import step_folder, step_of
from paceline.checkpoint.manifest import COMMIT_FILE
from paceline.errors import PacelineError, from_record
from paceline.run.directory import finished_record
from paceline.workers.processes import kill_all, started

_POLL_SECONDS = 0.005
_TAIL_LINES = 12


def run_to_end(run_dir: Path, words: Sequence[str]) -> dict[str, Any]:
    """`paceline train` in `run_dir`; returns its summary. What it prints goes into `<run_dir>.log`.

    Raises:
        PacelineError: what it came to, with its exit code.
    """
    out, log = _outputs(run_dir)
    with started(_train(run_dir, words), out, log) as process:
        code = process.wait()
    document = _document(out)
    if code != 0 or document is None:
        raise _failure(run_dir.name, code, document, log)
    return document


def run_until_killed(run_dir: Path, words: Sequence[str], step: int) -> int:
    """`paceline train` in `run_dir`, SIGKILLed with all its processes once its checkpoint of `step` is durable.

    Returns:
        How many processes there were; 0 where the run was done before the kill reached it.

    Raises:
        PacelineError: it ended before the checkpoint was durable.
    """
    out, log = _outputs(run_dir)
    mark = run_dir / "checkpoints" / step_folder(step) / COMMIT_FILE
    with started(_train(run_dir, words), out, log) as process:
        durable = _wait_for(mark, process)
        killed = kill_all(process) if process.poll() is None else 0
    if not durable:
        raise _failure(run_dir.name, process.returncode, _document(out), log)
    return 0 if finished_record(run_dir) is not None else killed


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


def _wait_for(mark: Path, process: subprocess.Popen[bytes]) -> bool:
    while not mark.exists():
        if process.poll() is not None:
            return mark.exists()
        time.sleep(_POLL_SECONDS)
    return True


def _train(run_dir: Path, words: Sequence[str]) -> list[str]:
    return ["train", *words, f"run.name={json.dumps(run_dir.name)}", "--json"]


def _outputs(run_dir: Path) -> tuple[Path, Path]:
    return run_dir.with_name(f"{run_dir.name}.json"), run_dir.with_name(f"{run_dir.name}.log")


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
        error.message = f"the run {name!r} of this proof ended with exit code {code}: {error.message}"
        error.values |= {"run": name, "exit": code, "log": str(log)}
        return error
    tail = "\n  ".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:])
    return PacelineError(
        f"the run {name!r} of this proof ended with exit code {code} and without a verdict; its last lines:\n  {tail}",
        values={"run": name, "exit": code, "log": str(log)},
        hint=f"All that it printed is in {log}.",
    )

"""The smoke test: five steps of a small version of the job on two ranks, as a `paceline train` of its own with a hard limit.

Imports no torch.
"""

from __future__ import annotations

import json
import math
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import tomlkit

from paceline.cluster.probe import probe_host
from paceline.config import Setting, Settings
from paceline.doctor.check import ALL_HOSTS, Finding
from paceline.errors import JobError
from paceline.job.load import SECTIONS, Job, job_of_settings
from paceline.job.resolve import resolve_job
from paceline.model.spec import ModelSpec, parameter_count
from paceline.units import format_seconds
from paceline.workers.processes import kill_all, started

STEPS, PROCS = 5, 2
LIMIT_SECONDS = 180.0
SMALL_PARAMETERS = 20_000_000
"""A model above this is made narrow and shallow: the test is of the host and the data, not of its size."""
SHORT_TOKENS = 256
_TAIL_LINES = 4

OWN = ("run.", "checkpoint.", "launch.", "recovery.", "telemetry.", "batch.")
"""Of these the small version has its own values."""
PARALLEL_KEPT = ("parallel.precision", "parallel.parameter_dtype")


class Smoke(NamedTuple):
    """How it went: figures for the document, and a finding where it failed."""

    figures: dict[str, Any]
    finding: Finding | None


def small_version(job: Job, folder: Path) -> Settings:
    """The settings of a job that takes the same path in seconds: its data, tokenizer, model family and, where it goes on two
    ranks, its layout."""
    procs = _procs()
    kept = {key: setting for key, setting in job.settings.items() if not key.startswith(OWN)}
    own = {
        "run.name": "smoke",
        "run.dir": str(folder),
        "run.steps": STEPS,
        "run.log_every": 1,
        "batch.global_batch": 8,
        "launch.procs_per_node": procs,
        "launch.nodes": 1,
        "data.eval_sequences": 8,
        "data.sequence_length": min(job.data.sequence_length, SHORT_TOKENS),
    }
    settings = kept | {key: Setting(value, "smoke") for key, value in own.items()}
    if job.is_set("model.preset") or any(key.startswith("model.") for key in job.settings):
        settings |= _small_model(settings)
    settings = {k: v for k, v in settings.items() if k != "parallel.compile"}
    if _goes(settings):
        return settings
    return {k: v for k, v in settings.items() if not k.startswith("parallel.") or k in PARALLEL_KEPT}


def _procs() -> int:
    """Two; one where there is one device, which cannot be shared."""
    return 1 if probe_host().devices == 1 else PROCS


def _small_model(settings: Settings) -> Settings:
    """Overrides that make the model of a job small; its family, vocabulary and kinds of layers stay."""
    try:
        spec = resolve_job(job_of_settings(_without_parallel(settings)), _procs(), probe_host()).spec
    except JobError:
        return {}
    if parameter_count(spec) <= SMALL_PARAMETERS:
        return {}
    small = {
        "num_layers": 2,
        "dim": 64,
        "num_heads": 4,
        "num_kv_heads": _kv_heads(spec),
        "head_dim": 16,
        "ffn_dim": 128,
    }
    return {f"model.{key}": Setting(value, "smoke") for key, value in small.items()}


def _kv_heads(spec: ModelSpec) -> int:
    return 2 if spec.num_kv_heads < spec.num_heads else 4


def _without_parallel(settings: Settings) -> Settings:
    return {k: v for k, v in settings.items() if not k.startswith("parallel.")}


def _goes(settings: Settings) -> bool:
    """Whether the small version runs on two ranks as it stands."""
    try:
        resolve_job(job_of_settings(settings), _procs(), probe_host())
    except JobError:
        return False
    return True


def try_out(job: Job, limit_seconds: float = LIMIT_SECONDS) -> Smoke:
    """Run the small version to its end, or until the limit; nothing of it is left behind."""
    with tempfile.TemporaryDirectory(prefix="paceline-smoke-") as name:
        folder = Path(name)
        file, out, log = folder / "smoke.toml", folder / "smoke.json", folder / "smoke.log"
        file.write_text(_toml(small_version(job, folder)), encoding="utf-8")
        began = time.monotonic()
        with started(["train", str(file), "--json"], out, log) as process:
            code = _wait(process, limit_seconds)
        return _verdict(code, time.monotonic() - began, _document(out), log, limit_seconds)


def _wait(process: subprocess.Popen[bytes], limit_seconds: float) -> int | None:
    """The exit code, or None where the limit was reached and all of it was ended."""
    try:
        return process.wait(timeout=limit_seconds)
    except subprocess.TimeoutExpired:
        kill_all(process)
        return None


def _verdict(code: int | None, seconds: float, document: dict[str, Any], log: Path, limit_seconds: float) -> Smoke:
    loss = document.get("loss")
    figures = {
        "procs": _procs(),
        "steps": document.get("steps"),
        "seconds": round(seconds, 3),
        "loss": loss,
        "exit": code,
    }
    if code is None:
        tail = _tail(log)
        return Smoke(figures, _finding(f"{STEPS} steps did not end within {format_seconds(limit_seconds)}: {tail}", ""))
    error = document.get("error") or {}
    if code != 0:
        said = error.get("message") or _tail(log)
        return Smoke(figures, _finding(f"it ended with exit code {code}: {said}", error.get("next") or ""))
    if document.get("steps") != STEPS or not isinstance(loss, float) or not math.isfinite(loss):
        return Smoke(figures, _finding(f"it made {document.get('steps')} of {STEPS} steps, with a loss of {loss}", ""))
    return Smoke(figures, None)


def _finding(found: str, mend: str) -> Finding:
    return Finding(
        id="smoke", severity="error", host=ALL_HOSTS, rank=None,
        found=f"{STEPS} steps of a small version of the job on {_procs()} ranks: {found}",
        why="what fails here in seconds fails on the cluster after its queue and its start, with 0 steps made",
        mend=mend or "run it with its output: paceline train JOB.toml run.steps=5 --procs 2",
        source="paceline, docs/guide/doctor.md",
    )  # fmt: skip


def _tail(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-_TAIL_LINES:]) or "it said nothing"


def _document(out: Path) -> dict[str, Any]:
    try:
        document = json.loads(out.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _toml(settings: Settings) -> str:
    tables: dict[str, Any] = {name: {} for name in SECTIONS}
    for key, setting in settings.items():
        section, _, name = key.partition(".")
        tables[section][name] = msgspec.to_builtins(setting.value)
    return tomlkit.dumps({name: table for name, table in tables.items() if table})

"""The report as data: the document of `paceline report --json`, from which pages and tables are made."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paceline.errors import JobError
from paceline.report.attempts import Attempt, Entry, Run, load
from paceline.report.attribution import predicted_measured, rank_parts, steady_steps, step_parts
from paceline.report.ledger import GOODPUT_DEFINITION, blocked_seconds, goodput, ledger, saves_of
from paceline.run.directory import stored_job
from paceline.run.lease import read_holder, why_dead
from paceline.run.records import json_safe

SCHEMA = "paceline.report/1"
_SERIES_POINTS = 1500
_STATES = {
    0: "done",
    74: "refused",
    75: "preempted",
    76: "stalled",
    79: "disk full",
    93: "no progress",
    130: "interrupted",
}
_ENVIRONMENT = (
    "device", "host", "world_size", "threads_per_rank", "precision", "compile", "versions", "peak_flop_per_second",
    "parameters", "flop_per_token", "flop_convention", "weights_hash", "microbatch", "accumulation", "global_batch",
    "sequence_length",
)  # fmt: skip


def summarise(run_dir: Path) -> dict[str, Any]:
    """The whole report of one run as plain JSON values. Works while the run goes on and after a crash.

    Raises:
        JobError: there is no run in `run_dir`; the nearest name is in the hint.
    """
    run_dir = Path(run_dir)
    job = stored_job(run_dir)
    run = load(run_dir)
    if job is None and not run.attempts:
        raise _no_run(run_dir)
    rows = ledger(run.attempts)
    steady = steady_steps(run.attempts)
    started = run.started or {}
    document = {
        "schema": SCHEMA,
        "run_dir": str(run_dir),
        "name": run_dir.resolve().name,
        "run_id": job.run_id if job else started.get("run_id"),
        **_verdict(run),
        **_headline(run, steady),
        "goodput": goodput(rows),
        "goodput_definition": GOODPUT_DEFINITION,
        "ledger": rows,
        "step_parts": step_parts(steady),
        "rank_parts": rank_parts(run.attempts),
        "predicted_measured": predicted_measured(run, _plan(run_dir)),
        "stragglers": _plain(run.of("straggler")),
        "faults": _plain(run.of("fault")),
        "restarts": _plain(run.of("restart")),
        "checkpoints": [_checkpoint(save) for save in saves_of(run.of("checkpoint"))],
        "evals": _plain(run.of("eval")),
        "changes": _plain(run.of("change")),
        "attempts": [_attempt(attempt, run.attempts[0].start) for attempt in run.attempts],
        "redone_steps": sorted({step["step"] for attempt in run.attempts for step in attempt.redone}),
        "skipped_steps": [step["step"] for step in run.kept if step.get("skipped")],
        "layout": started.get("layout", {}),
        "derivations": started.get("derivations", []),
        "environment": {key: started.get(key) for key in _ENVIRONMENT},
        "job": job.values if job else {},
        "torn_records": run.torn,
        "series": series(run.kept),
    }
    safe: dict[str, Any] = json_safe(document)
    return safe


def series(steps: list[Entry], points: int = _SERIES_POINTS) -> dict[str, list[float | None]]:
    """The curves over steps, thinned to about `points`: each bucket's last step, with its highest loss beside it."""
    width = max(1, -(-len(steps) // points))
    buckets = [steps[i : i + width] for i in range(0, len(steps), width)]
    last = [bucket[-1] for bucket in buckets]
    curves: dict[str, list[float | None]] = {
        key: [step.get(key) for step in last] for key in ("step", "loss", "grad_norm", "lr", "mfu", "attempt")
    }
    curves["loss_max"] = [max(_known(step.get("loss") for step in bucket), default=None) for bucket in buckets]
    curves["tokens_per_second"] = [
        sum(step["tokens"] for step in bucket) / max(1e-9, sum(step["seconds"] for step in bucket))
        for bucket in buckets
    ]
    return curves


def _verdict(run: Run) -> dict[str, Any]:
    """`state`, `exit` and `reason`; a run without a verdict is running while its lease lives, else crashed."""
    finished = run.finished
    if finished is not None:
        code = finished["exit"]
        return {"state": _STATES.get(code, "failed"), "exit": code, "reason": finished["reason"]}
    lease = run.path / "lease.json"
    holder = read_holder(lease)
    if holder is not None and why_dead(lease, holder) is None:
        return {"state": "running", "exit": None, "reason": f"held by pid {holder.pid} on {holder.host}"}
    if not run.attempts:
        return {"state": "not started", "exit": None, "reason": "there is a job and no record"}
    return {"state": "crashed", "exit": None, "reason": "the last attempt ended without a verdict"}


def _headline(run: Run, steady: list[Entry]) -> dict[str, Any]:
    kept = run.kept
    finished = run.finished or {}
    last: Entry = kept[-1] if kept else {}
    seconds = sum(step["seconds"] for step in steady)
    with_mfu = [step for step in steady if step.get("mfu") is not None]
    mfu_seconds = sum(step["seconds"] for step in with_mfu)
    evals = run.of("eval")
    return {
        "steps": last.get("step", 0),
        "samples": last.get("samples", 0),
        "loss": _first_known(finished.get("loss"), last.get("loss")),
        "grad_norm": last.get("grad_norm"),
        "eval_loss": _first_known(finished.get("eval_loss"), evals[-1]["loss"] if evals else None),
        "bigram_eval_loss": finished.get("bigram_eval_loss"),
        "tokens": sum(step["tokens"] for step in kept),
        "wall_seconds": run.attempts[-1].end - run.attempts[0].start if run.attempts else 0.0,
        "tokens_per_second": sum(step["tokens"] for step in steady) / seconds if seconds else None,
        "mfu": sum(step["mfu"] * step["seconds"] for step in with_mfu) / mfu_seconds if mfu_seconds else None,
        "peak_memory_bytes": finished.get("peak_memory_bytes") or [],
        "recompiles": finished.get("recompiles"),
    }


def _attempt(attempt: Attempt, origin: float) -> dict[str, Any]:
    first = attempt.first_step_start
    steps = attempt.of("step")
    finished = attempt.finished or {}
    return {
        "attempt": attempt.number,
        "ranks": attempt.ranks,
        "start_seconds": attempt.start - origin,
        "first_step_seconds": None if first is None else first - origin,
        "last_step_seconds": steps[-1]["time"] - origin if steps else None,
        "end_seconds": attempt.end - origin,
        "started_at": attempt.start,
        "from_step": attempt.started["step"] if attempt.started else None,
        "to_step": steps[-1]["step"] if steps else None,
        "redone_steps": len(attempt.redone),
        "exit": finished.get("exit"),
        "reason": finished.get("reason"),
        "layout": attempt.started.get("layout", {}) if attempt.started else {},
    }


def _checkpoint(save: list[Entry]) -> dict[str, Any]:
    seconds = {record["state"]: record["seconds"] for record in save}
    last = save[-1]
    return {
        "step": last["step"],
        "attempt": last["attempt"],
        "path": last["path"],
        "state": last["state"],
        "bytes": next((record["bytes"] for record in reversed(save) if record.get("bytes") is not None), None),
        "staged_seconds": seconds.get("staged"),
        "durable_seconds": seconds.get("durable"),
        "blocked_seconds": blocked_seconds(save),
    }


def _plan(run_dir: Path) -> dict[str, Any] | None:
    try:
        plan = json.loads((run_dir / "plan.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return plan if isinstance(plan, dict) else None


def _no_run(run_dir: Path) -> JobError:
    from paceline.config import nearest  # loads TOML and a text matcher, which only this error needs

    names = [path.name for path in run_dir.parent.iterdir() if path.is_dir()] if run_dir.parent.is_dir() else []
    near = nearest(run_dir.name, names)
    hint = f"Did you mean {run_dir.parent / near}?" if near else "Give the folder of a run, such as runs/tiny."
    return JobError(f"there is no run in {run_dir}", values={"run_dir": str(run_dir), "nearest": near}, hint=hint)


def _plain(records: Iterable[Entry]) -> list[Entry]:
    return [{key: value for key, value in record.items() if key != "kind"} for record in records]


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _first_known(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)

"""What the attempts of a run came to so far, from its records: how often it failed, and how long it took to go on."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import msgspec

from paceline.run.records import read_records

_KINDS = ("run_started", "window", "checkpoint", "certificate", "fault", "restart", "run_finished")
"""Without the steps: of a long run there are too many for each start to read."""
_STEPPED = ("window", "certificate")
_FAILED = (1, 76, 93)
"""Exit codes of runs that a failure ended; others are the job's fault, or somebody's will."""
_NO_FAILURE = ("PacelineError",)
"""Kinds of faults that all ranks agreed on."""


class History(msgspec.Struct, frozen=True):
    """`failures` in `run_seconds` of all attempts together; `recovery_seconds` from a failure until steps were made
    again, in the median, None where no failure was outlived."""

    failures: int = 0
    run_seconds: float = 0.0
    recovery_seconds: float | None = None


def history(run_dir: Path) -> History:
    """The history of the run in `run_dir`; nothing for a fresh one."""
    by_attempt: dict[int, list[dict[str, Any]]] = {}
    for record in read_records(run_dir, kinds=_KINDS):
        by_attempt.setdefault(int(record["attempt"]), []).append(record)
    failures, seconds, recoveries = 0, 0.0, []
    failed_at: float | None = None
    for _, records in sorted(by_attempt.items()):
        seconds += records[-1]["time"] - records[0]["time"]
        first_step = next((r["time"] for r in records if r["kind"] in _STEPPED), None)
        if failed_at is not None and first_step is not None:
            recoveries.append(first_step - failed_at)
            failed_at = None
        fault = next((r for r in reversed(records) if r["kind"] == "fault"), None)
        if fault is None or fault.get("kind_of_fault") in _NO_FAILURE:
            continue
        # A fault alone is no failure: what was only suspected is on record too. An attempt that goes on with other
        # ranks, as it was asked to, has a restart alone.
        is_restarted = any(r["kind"] == "restart" for r in records)
        failures += is_restarted or any(r["kind"] == "run_finished" and r["exit"] in _FAILED for r in records)
        # A command given later has waited for somebody; that is no recovery.
        if is_restarted and failed_at is None:
            failed_at = fault["time"]
    return History(failures, seconds, statistics.median(recoveries) if recoveries else None)

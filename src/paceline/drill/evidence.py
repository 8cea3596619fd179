"""What the records of a trial say of its fault: when it was seen, by which name, and what it cost. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from paceline.drill.faults import Fault
from paceline.errors import WorkerFailed
from paceline.run.records import read_records, redone

Entry = dict[str, Any]

KINDS = ("run_started", "step", "checkpoint", "fault", "straggler", "run_finished")


class Evidence(NamedTuple):
    """Times are seconds after the fault; `named` and `named_rank` are those of the record that names it.

    within: whether no more work was lost than was done since the last checkpoint that was durable before the fault.
    """

    attempts: int
    detect_seconds: float | None
    recover_seconds: float | None
    steps_redone: int
    named: str | None
    named_rank: int | None
    within: bool
    failed_saves: int
    skipped: list[int]


def gather(run_dir: Path, fault: Fault, truth: Sequence[Entry]) -> Evidence:
    """Read the records of a trial's run beside the truth."""
    records = list(read_records(run_dir, kinds=KINDS))
    struck = truth[0] if truth else None
    after = [] if struck is None else [r for r in records if r["time"] >= struck["time"]]
    seen = next((r for r in after if _names(r, fault)), None)
    steps = [r for r in records if r["kind"] == "step"]
    lost = len(redone(records))
    attempts = max((int(r["attempt"]) for r in records), default=0)
    return Evidence(
        attempts=attempts,
        detect_seconds=_since(struck, seen),
        recover_seconds=_since(struck, _recovered(after, fault)),
        steps_redone=lost,
        named=_name(seen) if fault.named and seen is not None else None,
        named_rank=seen.get("rank") if fault.named and seen is not None else None,
        within=fault.strikes != "worker"
        or struck is None
        or lost <= _since_durable(records, struck) * max(1, attempts - 1),
        failed_saves=sum(r["kind"] == "checkpoint" and r["state"] == "failed" for r in records),
        skipped=[int(r["step"]) for r in steps if r.get("skipped")],
    )


def last_step(run_dir: Path) -> int:
    """The last step on record."""
    return max((int(r["step"]) for r in read_records(run_dir, kinds=("step",))), default=0)


def _names(record: Entry, fault: Fault) -> bool:
    """Whether this is the record by which such a fault is seen."""
    if fault.kind.startswith("slow-"):
        return bool(record["kind"] == "straggler")
    if fault.strikes == "checkpoint":
        return bool(record["kind"] == "checkpoint" and record["state"] == "quarantined")
    if fault.strikes == "writer":
        return bool(record["kind"] == "checkpoint" and record["state"] == "failed")
    if fault.ends == "bad step":
        return bool(record["kind"] == "step" and record.get("skipped"))
    if fault.ends == "preempted":
        return bool(record["kind"] == "run_finished")
    return bool(record["kind"] == "fault")


def _name(record: Entry) -> str:
    """The kind that a record names, in the words of `faults.FAULTS`."""
    if record["kind"] == "straggler":
        return str(record["cause"])
    kind, message = str(record["kind_of_fault"]), str(record["message"])
    if kind != WorkerFailed.__name__:
        return kind
    return "exception" if " raised " in message else "killed" if " by signal " in message else kind


def _recovered(after: Sequence[Entry], fault: Fault) -> Entry | None:
    """The first step of the next attempt; of a full disk, the next checkpoint that is whole."""
    if fault.strikes == "writer":
        return next((r for r in after if r["kind"] == "checkpoint" and r["state"] == "durable"), None)
    if fault.alive or fault.ends in ("no progress", "bad step") or not after:
        return None
    begun = next((i for i, r in enumerate(after) if r["kind"] == "run_started"), len(after))
    return next((r for r in after[begun:] if r["kind"] == "step"), None)


def _since_durable(records: Sequence[Entry], struck: Entry) -> int:
    """Steps that were done when the attempt ended and that no checkpoint held when the fault struck."""
    before = [
        r for r in records if r["kind"] == "checkpoint" and r["state"] == "durable" and r["time"] <= struck["time"]
    ]
    durable = max((int(r["step"]) for r in before), default=0)
    done = [int(r["step"]) for r in records if r["kind"] == "step" and r["attempt"] == struck["attempt"]]
    return max(done, default=0) - durable


def _since(struck: Entry | None, record: Entry | None) -> float | None:
    return None if struck is None or record is None else max(0.0, float(record["time"]) - float(struck["time"]))

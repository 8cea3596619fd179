"""What follows an attempt on several nodes, from how it ended on each of them: pure functions, no torch.

A node may leave: the rest goes on, as long as it is enough. One that comes is let in after a step. A failure is told by its
first cause, on whichever node that was, and follows the policy of `workers.supervise`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from paceline.errors import Interrupted, PacelineError, Preempted, WorkerFailed, from_record
from paceline.run.control import DOOR, FOLDER, STOP
from paceline.workers.verdict import Cause

_ORDER: Mapping[Cause, int] = {"own": 0, "timeout": 2, "consequence": 3}
_LOST = 1
"""Between what a node knows of itself and what others only saw of it."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """How an attempt ended on one node.

    host: its name.
    serves: whether the nodes meet at its supervisor.
    error: of its workers, as `PacelineError.to_record`; None where all are done.
    cause: where that began; see `decide.Decision`.
    leaving: how somebody asked this node's supervisor to stop, if so.
    asked: how its workers came to stop, if somebody asked for it.
    agreed: whether all its ranks raised the same error of ours.
    ended_at: seconds since the epoch.
    """

    host: str
    serves: bool = False
    error: dict[str, Any] | None = None
    cause: Cause = "own"
    leaving: str | None = None
    asked: str | None = None
    signature: str | None = None
    agreed: bool = False
    reached: int = 0
    rank: int | None = None
    fault: str | None = None
    evidence: str | None = None
    traceback: str | None = None
    ended_at: float = 0.0


class Follows(msgspec.Struct, frozen=True, kw_only=True):
    """What follows: all is `done`; the nodes `meet` again without a failure; one has `failed`; or the run `stops`, as asked.

    node: the one where it began, if it began somewhere.
    ends: the run was told to stop on all nodes, or cannot go on without one that leaves; a failure then ends it.
    """

    kind: Literal["done", "meet", "failed", "stops"]
    error: PacelineError | None = None
    node: int | None = None
    reason: str = ""
    ends: bool = False


GONE_SECONDS = 8.0
"""A node that was silent for so long is gone: its supervisor was killed, or its host lost."""


def follows(reports: Mapping[int, Report | None], hosts: Mapping[int, str], least: int) -> Follows:
    """What follows an attempt.

    Args:
        reports: by node rank; None for a node that is gone.
        hosts: names by node rank.
        least: nodes that a run needs.
    """
    told = {node: report for node, report in reports.items() if report is not None}
    errors = {node: from_record(r.error) for node, r in told.items() if r.error is not None}
    if len(told) == len(reports) and not errors:
        return Follows(kind="done")
    leavers = [node for node, report in told.items() if report.leaving is not None]
    failed = first_failure(reports, errors)
    if failed is None or (leavers and failed in told and told[failed].cause != "own"):
        return _stopped(told, errors, leavers, hosts, least)
    error = errors[failed] if failed in told else gone(failed, hosts[failed])
    ends = _is_stopped(told) or any(told[node].serves for node in leavers)
    return Follows(kind="failed", error=error, node=failed, ends=ends)


def first_failure(reports: Mapping[int, Report | None], errors: Mapping[int, PacelineError]) -> int | None:
    """The node whose failure the others follow from; None where all that ended was asked to."""

    def order(node: int) -> tuple[int, float]:
        report = reports[node]
        return (_LOST, 0.0) if report is None else (_ORDER[report.cause], report.ended_at)

    failed = [
        node
        for node, report in reports.items()
        if report is None or (node in errors and not isinstance(errors[node], Preempted | Interrupted))
    ]
    return min(failed, key=order, default=None)


def _stopped(
    told: Mapping[int, Report], errors: Mapping[int, PacelineError], leavers: list[int], hosts: Mapping[int, str], least: int
) -> Follows:  # fmt: skip
    stops = _is_stopped(told)
    comes = any(report.asked is not None and report.asked.startswith(DOOR) for report in told.values())
    stay = [node for node in told if node not in leavers]
    serves = any(told[node].serves for node in leavers)
    if not stops and (leavers or comes) and len(stay) >= least and not serves:
        return Follows(kind="meet", reason=_why_meet(leavers, hosts, len(stay)))
    # Who saved can tell most.
    kinds = (Preempted, Interrupted, PacelineError)
    error = next((e for kind in kinds for e in errors.values() if isinstance(e, kind)), None)
    error = error or Interrupted("interrupted before the end; nothing was saved")
    if leavers and not stops:
        error.message += f" ({_why_end(leavers, hosts, len(stay), least, serves=serves)})"
    return Follows(kind="stops", error=error)


def _is_stopped(told: Mapping[int, Report]) -> bool:
    """Whether the whole run was told to stop."""
    return any(report.asked is not None and report.asked.startswith(f"{FOLDER}/{STOP}") for report in told.values())


def _why_meet(leavers: list[int], hosts: Mapping[int, str], stay: int) -> str:
    if not leavers:
        return "a node has come"
    return f"{_named(leavers, hosts)} left; {_nodes(stay)} go{'es' if stay == 1 else ''} on"


def _why_end(leavers: list[int], hosts: Mapping[int, str], stay: int, least: int, *, serves: bool) -> str:
    if not stay:
        return "all nodes were asked to stop"
    if serves:
        return f"{_named(leavers, hosts)} left, whose supervisor serves launch.rendezvous"
    few = f"{_nodes(stay)} {'is' if stay == 1 else 'are'} fewer than the {least} of launch.nodes"
    return f"{_named(leavers, hosts)} left, and {few}"


def gone(node: int, host: str) -> PacelineError:
    """The error where a node gives no sign of life."""
    return WorkerFailed(
        f"node {node} ({host}) is gone: no sign of life for {GONE_SECONDS:.0f} s",
        values={"node": node, "host": host, "seconds": GONE_SECONDS},
        hint=f"Look at {host}; paceline, started there again, comes back into the run.",
    )


def _named(nodes: list[int], hosts: Mapping[int, str]) -> str:
    return ", ".join(f"node {node} ({hosts[node]})" for node in nodes)


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"

"""What the supervisors of several hosts tell each other around an attempt, and what each makes of it."""

from __future__ import annotations

import os
import time
from typing import Any, NoReturn

import msgspec

from paceline.errors import Interrupted, JobError, PacelineError, Preempted, from_record
from paceline.run.directory import RunDirectory
from paceline.train.attempts import attempt_of
from paceline.train.local_attempt import say
from paceline.train.node_outcome import Report, gone
from paceline.units import format_seconds
from paceline.workers.nodes import TELL_SECONDS, NotHeard, Party
from paceline.workers.presence import Presence, ended_key
from paceline.workers.supervise import Attempt, End
from paceline.workers.watch import GroupResult

_ECHO_SECONDS = 5.0
"""After a failure on another node the ranks here have so long to see it themselves, and tell what they waited for."""

_OWN_KEYS = ("launch.threads", "launch.affinity", "launch.port")
"""What each host may have in its own way."""


class Again(Exception):
    """Meet again, without a word about it: the nodes have changed before the attempt began."""


def heard_of(party: Party, presence: Presence, rank: int, key: str, seconds: float = TELL_SECONDS) -> Any:
    """What another node shares, unless it goes before: then the rest meets again."""
    try:
        return party.hear(key, seconds, lambda: rank in presence.gone())
    except NotHeard:
        say(f"paceline: node {rank} ({party.told[rank]['host']}) is gone before it began")
        raise Again from None


def broke_elsewhere(party: Party, presence: Presence) -> PacelineError | None:
    """What broke on another node, where this one's ranks may wait in vain for it: their connections need not tell."""
    for rank in presence.gone():
        return gone(rank, str(party.told[rank]["host"]))
    for rank in presence.ended(_ECHO_SECONDS):
        error = msgspec.convert(party.heard(ended_key(rank)), Report).error
        # One that was asked to stop, or is done, has the others end their own work.
        if error is not None and not isinstance(from_record(error), Preempted | Interrupted):
            return from_record(error)
    return None


def leader_of(party: Party) -> int:
    """The node that has the directory already; else the first."""
    return next((rank for rank, told in enumerate(party.told) if told["leads"]), 0)


def agree(party: Party) -> None:
    """Make sure that all nodes were told the same job.

    Raises:
        JobError: what differs, on all nodes alike.
    """
    first = party.told[0]
    for rank, told in enumerate(party.told):
        if told["procs"] != first["procs"]:
            _refuse("launch.procs_per_node", first["procs"], told["procs"], party, rank)
        for key in sorted({*first["values"], *told["values"]}):
            ours, theirs = first["values"].get(key), told["values"].get(key)
            if ours != theirs and key not in _OWN_KEYS:
                _refuse(key, ours, theirs, party, rank)


def _refuse(key: str, first: Any, other: Any, party: Party, rank: int) -> NoReturn:
    raise JobError(
        f"the nodes were told different jobs: {first!r} on node 0 ({party.told[0]['host']}), {other!r} on node {rank} "
        f"({party.told[rank]['host']})",
        key=key,
        values={"node": rank, "host": party.told[rank]["host"], "first": first, "other": other},
        hint="Give the same command on all nodes; what a host derives from its own size must be named.",
    )


def report_of(serves: bool, leaving: str | None, result: GroupResult, directory: RunDirectory) -> Report:
    ended = attempt_of(result, directory)
    return Report(
        host=os.uname().nodename, serves=serves, error=None if result.error is None else result.error.to_record(),
        cause=result.cause, leaving=leaving, asked=result.asked, signature=ended.signature, agreed=ended.agreed,
        reached=ended.reached, rank=result.rank, fault=result.fault, evidence=result.evidence,
        traceback=result.traceback, ended_at=time.time() - (time.monotonic() - result.failed_at),
    )  # fmt: skip


def tell_meet(party: Party, delay_seconds: float, failed: Attempt | None = None) -> None:
    """Have the nodes meet again; after an attempt that failed each of them counts it, for the one that may lead next."""
    ended = None
    if failed is not None:
        ended = {**failed._asdict(), "error": None if failed.error is None else failed.error.to_record()}
    party.share("next", {"meet": True, "delay_seconds": delay_seconds, "failed": ended})


def failed_of(heard: dict[str, Any]) -> Attempt | None:
    """The attempt that failed, as the leader saw it, if there was one."""
    told = heard.get("failed")
    if told is None:
        return None
    return Attempt(**{**told, "error": None if told["error"] is None else from_record(told["error"])})


def tell_end(party: Party, end: End) -> None:
    error = None if end.error is None else end.error.to_record()
    party.share("next", {"meet": False, "ends": error, "traceback": end.traceback})


def followed(heard: dict[str, Any]) -> End | None:
    """What the leader has said."""
    if heard["meet"]:
        if heard["delay_seconds"]:
            say(f"paceline: meeting again in {format_seconds(heard['delay_seconds'])}")
        time.sleep(heard["delay_seconds"])
        return None
    return End(None if heard["ends"] is None else from_record(heard["ends"]), heard["traceback"])

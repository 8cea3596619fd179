"""From what is known about ended workers to the one error that the user is told: the first failure in time, by rank.

A rank that failed by itself comes before one that waited in vain, and that before one that saw a connection break: the
echoes of a failure often end sooner than the rank that caused them.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from paceline.errors import Interrupted, OutOfMemory, PacelineError, Stalled, WorkerFailed
from paceline.units import format_seconds
from paceline.workers import screen
from paceline.workers.heartbeat import Beat
from paceline.workers.recorder import Seen, seen_of
from paceline.workers.signals import signal_reason
from paceline.workers.suspects import mismatch_at_end, source_line
from paceline.workers.verdict import Cause, Verdict, error_of
from paceline.workers.watchdog import Stall

_ORDER = {"own": 0, "timeout": 1, "consequence": 2}
_MEMORY_KINDS = ("OutOfMemoryError", "MemoryError")
_MISMATCH = "collective mismatch in your code"
"""In Gloo's words."""
_MEMORY_WORDS = ("out of memory", "can't allocate memory", "not enough memory", "Cannot allocate memory")


class Ending(NamedTuple):
    """How one rank ended. `returncode` is negative for a signal, None where it still ran when the group was ended."""

    rank: int
    returncode: int | None
    monotonic: float
    verdict: Verdict | None
    tail: Sequence[str] = ()
    beat: Beat | None = None
    out_of_memory: bool = False
    """The kernel counted a kill for memory while the group ran."""

    @property
    def failed(self) -> bool:
        if self.verdict is not None:
            return self.verdict.exit != 0
        return self.returncode not in (0, None)

    @property
    def cause(self) -> Cause:
        if self.verdict is None and self.returncode == -6 and any("Watchdog caught" in line for line in self.tail):
            return "timeout"
        return self.verdict.cause if self.verdict is not None else "own"

    @property
    def time(self) -> float:
        return self.verdict.monotonic if self.verdict is not None else self.monotonic


class Decision(NamedTuple):
    """The error of a group, the rank it started at and its traceback (none for a `PacelineError`).

    `fault` is its kind in one word, as far as it is known, `evidence` all that shows it. `cause` is `own` where it began on
    this host; what only waited (`timeout`), or saw a connection break (`consequence`), may follow from another one.
    """

    error: PacelineError
    rank: int | None
    traceback: str | None = None
    fault: str | None = None
    evidence: str | None = None
    cause: Cause = "own"


def first_failure(endings: Sequence[Ending]) -> Ending | None:
    """The failure that the others follow from."""
    failed = [ending for ending in endings if ending.failed]
    return min(failed, key=lambda e: (_ORDER[e.cause], e.time), default=None)


def decide(
    endings: Sequence[Ending],
    stacks: Mapping[int, str],
    seen: Mapping[int, Seen] | None = None,
    world_size: int | None = None,
) -> Decision | None:
    """What to tell, or None where no rank failed.

    Args:
        endings: of the ranks of this host.
        stacks: Python stacks, by rank, of those that still ran at the first failure.
        seen: the collectives that those had entered.
        world_size: ranks of all hosts, if there are others.
    """
    world_size = world_size or len(endings)
    first = first_failure(endings)
    if first is None:
        return None
    if (mismatch := _mismatched(first, endings, stacks, seen or {}, world_size)) is not None:
        return mismatch
    if first.cause != "own" and (first.verdict is None or error_of(first.verdict) is None):
        return _waited_in_vain(first, endings, stacks)
    if first.verdict is None:
        return Decision(_died(first, world_size), first.rank)
    error = error_of(first.verdict)
    if error is not None:
        return Decision(_with_rank(error, first, endings), first.rank)
    if first.verdict.error is None:
        return Decision(_left(first, world_size, first.verdict.exit), first.rank)
    return _raised(first, first.verdict, world_size)


def stalled(stall: Stall, world_size: int) -> Decision:
    """A rank does not move: the verdict of the watchdog."""
    finding, snapshot = stall.finding, stall.snapshot
    error = screen.stalled(finding, snapshot, stall.limit)
    told = screen.screen(finding, snapshot, stall.limit, world_size)
    cause: Cause = "timeout" if finding.kind == "link" else "own"
    return Decision(error, finding.ranks[0], told, finding.kind, screen.evidence(finding, snapshot), cause)


def not_started(
    seconds: float, missing: Sequence[int], beats: Mapping[int, Beat | None], world_size: int
) -> PacelineError:
    """The workers did not meet in time."""
    phases = {rank: beat.phase if (beat := beats.get(rank)) else "not running Python yet" for rank in missing}
    told = ", ".join(f"rank {rank} ({phase})" for rank, phase in phases.items())
    return Stalled(
        f"{len(missing)} of {world_size} workers did not join in {format_seconds(seconds)}: {told}",
        key="recovery.start_timeout",
        values={"ranks": list(missing), "seconds": seconds},
        hint="Raise recovery.start_timeout if this machine needs longer to start.",
    )


def stopped(told: Sequence[Ending], how: str, killed: Sequence[int], waited: float | None) -> Decision:
    """What came of a request to stop that was made `how`.

    Args:
        told: ranks that have told how they ended.
        killed: ranks that were killed for not ending.
        waited: the time that they had had, in seconds; None where somebody left at once.
    """
    if waited is not None:
        own = decide([e for e in told if e.cause == "own" and not _is_interrupted(e)], {})
        if own is not None:
            return own
    first = next((e for e in told if _is_interrupted(e)), None)
    error = error_of(first.verdict) if first is not None and first.verdict is not None and not killed else None
    return Decision(error or interrupted(how, killed, waited), None)


def stopped_in_vain(how: str, vain: Decision) -> Decision:
    """A request to stop that was made `how` can come to nothing, for what `vain` says."""
    error = interrupted(how, [], None)
    error.message += f": {vain.error.message}"
    error.values = {**error.values, "fault": vain.fault, "rank": vain.rank}
    return vain._replace(error=error)


def _is_interrupted(ending: Ending) -> bool:
    return ending.verdict is not None and ending.verdict.exit == Interrupted.exit_code


def interrupted(how: str, killed: Sequence[int], waited: float | None) -> Interrupted:
    """The run was ended before anything was saved; see `stopped`."""
    late = ""
    if killed and waited is not None:
        late = f"; ranks {', '.join(map(str, killed))} did not stop in {format_seconds(waited)} and were killed"
    elif killed:
        late = "; left at once, as it was asked for twice"
    values = {"how": how, "killed": list(killed), "at_once": bool(killed) and waited is None}
    return Interrupted(f"interrupted by {how}; nothing was saved{late}", values=values)


def _mismatched(
    first: Ending, endings: Sequence[Ending], stacks: Mapping[int, str], seen: Mapping[int, Seen], world_size: int
) -> Decision | None:
    """Ranks that entered different collectives as one: the engine ends one of them, and not always the one to blame."""
    aborted = first.verdict is None and first.returncode == -signal.SIGABRT
    if not aborted and first.cause == "own":
        return None
    told = {e.rank: s for e in endings if e.verdict is not None and (s := seen_of(e.verdict.seen)) is not None}
    unknown = [e.rank for e in endings if e.failed and e.rank not in told]
    words = any(_MISMATCH in line for e in endings for line in e.tail)
    found = mismatch_at_end({**seen, **told}, unknown, certain=words)
    if found is None:
        return None
    by_rank = {ending.rank: ending for ending in endings}
    step = max(
        (e.verdict.step for e in endings if e.verdict is not None), default=first.beat.step if first.beat else -1
    )
    where = next((line for r in found.ranks if (line := _where(by_rank[r], stacks.get(r, "")))), None)
    message = (
        f"mismatched-collective: {_ranks(found.ranks)} of {world_size}{_at(step, '')} {found.said}"
        f"{f' ({where})' if where else ''}"
    )
    if found.waits_for is not None:
        message += f"; {_ranks(found.waiting)} waited in {found.waits_for}"
    values = {"fault": found.kind, "rank": found.ranks[0], "ranks": list(found.ranks), "step": step, "where": where}
    hint = (
        "All ranks must call the same collectives in the same order with the same sizes: look for a branch on the rank."
    )
    text = _stack_text(found.ranks, stacks)
    return Decision(WorkerFailed(message, values=values, hint=hint), found.ranks[0], text, found.kind, text)


def _where(ending: Ending, stack: str) -> str | None:
    return source_line(stack) or (ending.verdict.where if ending.verdict is not None else None)


def _waited_in_vain(first: Ending, endings: Sequence[Ending], stacks: Mapping[int, str]) -> Decision:
    """A collective timed out, or broke without a rank that failed by itself."""
    verdict = first.verdict
    missing = [e for e in endings if not e.failed and (e.returncode is None or e.returncode == 0)]
    step = verdict.step if verdict is not None else first.beat.step if first.beat else -1
    collective = (verdict.collective if verdict is not None else None) or "a collective"
    phase = f" while {verdict.phase}" if verdict is not None and verdict.phase else ""
    at = f"step {step}" if step >= 0 else "the start"
    waited = [e.rank for e in endings if e not in missing]
    message = f"{_ranks(waited)} waited in vain at {at}{phase}: {collective} did not complete"
    if missing:
        message += f"; {_ranks([e.rank for e in missing])} did not arrive ({'; '.join(map(_last_seen, missing))})"
    else:
        message += f" ({_first_line(verdict)})"
    error = Stalled(
        message,
        values={"step": step, "collective": collective, "ranks": [e.rank for e in missing], "waiting": waited},
        hint="Its stack stands above." if missing else "Look for a slow or broken link between the ranks.",
    )
    rank = missing[0].rank if missing else first.rank
    text = _stack_text([e.rank for e in missing], stacks) if missing else verdict.traceback if verdict else None
    return Decision(error, rank, text, cause="own" if missing else first.cause)


def _last_seen(ending: Ending) -> str:
    if ending.returncode == 0:
        return f"rank {ending.rank} had ended already"
    beat = ending.beat
    return (
        f"rank {ending.rank} last seen at step {beat.step} in {beat.phase!r}"
        if beat
        else f"rank {ending.rank} not seen"
    )


def _raised(first: Ending, verdict: Verdict, world_size: int) -> Decision:
    record = verdict.error or {}
    kind, text = str(record.get("kind")), str(record.get("message")).strip()
    place = f" ({verdict.where})" if verdict.where else ""
    message = f"rank {first.rank} of {world_size} raised {kind}{_at(verdict.step, verdict.phase)}: {text}{place}"
    values = {"rank": first.rank, "host": verdict.host, "step": verdict.step, "where": verdict.where}
    if kind in _MEMORY_KINDS or any(words in text for words in _MEMORY_WORDS):
        return Decision(
            OutOfMemory(message, values=values, hint="Lower batch.microbatch."), first.rank, verdict.traceback
        )
    return Decision(WorkerFailed(message, values=values), first.rank, verdict.traceback)


def _died(first: Ending, world_size: int) -> PacelineError:
    code = first.returncode or 0
    if code > 0:
        return _left(first, world_size, code)
    step, phase = (first.beat.step, first.beat.phase) if first.beat else (-1, "")
    who = f"rank {first.rank} of {world_size}"
    values = {"rank": first.rank, "signal": -code, "step": step}
    if code == -9 and first.out_of_memory:
        return OutOfMemory(
            f"{who} was killed by the kernel{_at(step, phase)}: the memory of this host or container is used up",
            values=values,
            hint="Lower batch.microbatch or start fewer processes.",
        )
    return WorkerFailed(
        f"{who} was ended{_at(step, phase)} by {signal_reason(-code)}{_quoted(first.tail)}",
        values=values,
        hint="Look for it in dmesg, or lower batch.microbatch if memory is short." if code == -9 else None,
    )


def _left(first: Ending, world_size: int, code: int) -> PacelineError:
    """It ended with an exit code and told no reason; a code of ours keeps its meaning."""
    subclasses: list[type[PacelineError]] = PacelineError.__subclasses__()
    kinds = {kind.exit_code: kind for kind in subclasses if kind.exit_code > 1}
    return kinds.get(code, WorkerFailed)(
        f"rank {first.rank} of {world_size} ended with exit code {code}{_quoted(first.tail)}",
        values={"rank": first.rank, "exit": code},
    )


def _with_rank(error: PacelineError, first: Ending, endings: Sequence[Ending]) -> PacelineError:
    told = [e.verdict.error.get("message") for e in endings if e.verdict is not None and e.verdict.error is not None]
    error.values.setdefault("rank", first.rank)
    if len(endings) > 1 and told.count(error.message) < len(endings):
        error.message = f"rank {first.rank}: {error.message}"
    return error


def _at(step: int, phase: str) -> str:
    return f" at step {step}" if step >= 0 else f" while {phase}" if phase else ""


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"


def _first_line(verdict: Verdict | None) -> str:
    message = str((verdict.error or {}).get("message", "")) if verdict is not None else ""
    return message.strip().splitlines()[0] if message.strip() else "no reason given"


def _stack_text(ranks: Sequence[int], stacks: Mapping[int, str]) -> str | None:
    parts = [f"rank {rank}:\n{stacks[rank].rstrip()}\n" for rank in ranks if rank in stacks]
    return "".join(parts) or None


def _quoted(tail: Sequence[str]) -> str:
    lines = [line for line in tail if line.strip()][-8:]
    return "; it printed last:\n" + "\n".join(f"    {line}" for line in lines) if lines else ""

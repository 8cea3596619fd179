"""A stall told on one screen, and kept whole as evidence."""

from __future__ import annotations

import time
from collections.abc import Sequence

from paceline.errors import Stalled
from paceline.units import format_seconds
from paceline.workers.suspects import Finding, RankView, Snapshot, main_frames, source_line

STACK_LINES = 8
"""Innermost frames of the rank to blame that the screen shows; the evidence has all."""


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 1`, or `ranks 0, 2`."""
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"


def sentence(finding: Finding, snapshot: Snapshot) -> str:
    """Who, where, why, and what the others wait for."""
    first = snapshot.ranks[finding.ranks[0]]
    at = f"step {first.step}" if first.step >= 0 else "the start"
    text = f"{finding.kind}: {ranks_text(finding.ranks)} on {snapshot.host} at {at} in {first.phase!r}: {finding.said}"
    if finding.waiting:
        text += f"; {ranks_text(finding.waiting)} wait" + ("s" if len(finding.waiting) == 1 else "")
        text += f" in {finding.waits_for}" if finding.waits_for is not None else ""
    return text


def stalled(finding: Finding, snapshot: Snapshot, limit: float) -> Stalled:
    """The error of a group that was ended for a stall."""
    first = snapshot.ranks[finding.ranks[0]]
    return Stalled(
        f"no progress for {format_seconds(first.silent_seconds)}; {sentence(finding, snapshot)}",
        key="recovery.stall_timeout",
        values={
            "fault": finding.kind,
            "rank": finding.ranks[0],
            "ranks": list(finding.ranks),
            "host": snapshot.host,
            "step": first.step,
            "phase": first.phase,
            "seconds": first.silent_seconds,
            "limit_seconds": limit,
            "sure": finding.doubt == "none",
            "collective": str(finding.waits_for) if finding.waits_for is not None else None,
            "where": source_line(first.stack),
            "waiting": list(finding.waiting),
        },
        hint="If this was long work and no stall, set recovery.stall_timeout." if finding.doubt != "none" else None,
    )


def screen(finding: Finding, snapshot: Snapshot, limit: float, world_size: int) -> str:
    """At most some twenty lines: who, what, since when, who waits where."""
    first = snapshot.ranks[finding.ranks[0]]
    since = time.strftime("%H:%M:%S", time.localtime(time.time() - first.silent_seconds))
    lines = [
        f"paceline: stalled: {ranks_text(finding.ranks)} of {world_size} on {snapshot.host}: {finding.kind}",
        f"  what     {finding.said}",
        f"  where    step {first.step}, {first.phase!r}, process {first.sample.pid}",
        f"  since    {since}, {format_seconds(first.silent_seconds)} ago; limit {format_seconds(limit)}",
    ]
    if finding.waits_for is not None:
        lines.append(f"  others   {ranks_text(finding.waiting)} wait in {finding.waits_for}")
    shown = [rank for rank in finding.waiting if rank in snapshot.ranks][:6]
    lines += [f"  rank {rank:<3} {_stands(snapshot.ranks[rank])}" for rank in shown]
    if len(finding.waiting) > len(shown):
        lines.append(f"  ...      and {len(finding.waiting) - len(shown)} more")
    frames = main_frames(first.stack)[:STACK_LINES]
    if frames:
        lines.append(f"  stack of rank {first.rank}, innermost first:")
        lines += [f"    {file}:{line} in {name}" for file, line, name in frames]
    return "\n".join(lines)


def evidence(finding: Finding, snapshot: Snapshot) -> str:
    """All that was seen of every rank, the ones to blame first."""
    order = [*finding.ranks, *(rank for rank in sorted(snapshot.ranks) if rank not in finding.ranks)]
    return "\n".join(_all_of(snapshot.ranks[rank]) for rank in order if rank in snapshot.ranks)


def _stands(view: RankView) -> str:
    running = view.seen.running if view.seen is not None else []
    parts = [f"in {running[0]}" if running else f"in {view.phase!r}", source_line(view.stack) or ""]
    return ", ".join(part for part in parts if part)


def _all_of(view: RankView) -> str:
    sample = view.sample
    pulse = f"pulse {view.pulse_age:.1f} s ago" if view.pulse_age is not None else "no pulse"
    lines = [
        f"rank {view.rank}: step {view.step}, {view.phase!r} ({view.section}), silent for {view.silent_seconds:.1f} s, "
        f"{pulse}",
        f"process {sample.pid}: state {sample.state or '?'}, main thread {sample.main_state or '?'}"
        f" in {sample.waits_in or '?'}, {sample.main_cpu_seconds:.2f} s of processor time",
    ]
    if view.seen is not None:
        ended = [entry for entry in view.seen.entries if not entry.running]
        lines += [f"ended last: {entry}" for entry in ended[-1:]]
        lines += [f"waits in: {entry}" for entry in view.seen.running]
    for helper in view.helpers:
        lines.append(
            f"{helper.name}, process {helper.sample.pid}: state {helper.sample.state} in {helper.sample.waits_in or '?'}"
        )
        lines += [helper.stack.rstrip()] if helper.stack else []
    lines += [f"not acknowledged: {connection}" for connection in view.unacknowledged]
    return "\n".join([*lines, view.stack.rstrip(), ""])

"""Watches the ranks of one group for a stall: looks when nothing moves, names who it is, and acts once that is sure.

What is not sure is told first (`Warned`) and acted on after a longer time; if the ranks go on, that is told as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from paceline.units import format_seconds
from paceline.workers import heartbeat, screen
from paceline.workers.heartbeat import Beat
from paceline.workers.limits import Limits
from paceline.workers.look import Looker
from paceline.workers.sample import GONE, sample
from paceline.workers.suspects import Finding, Snapshot, find

GAP_SECONDS = 2.0
"""Where the supervisor itself did not run for so long, the whole machine stood still: nothing is held against the ranks."""
ELSEWHERE = 1.5
"""Of the limit to tell, and of the longest one to act: what another host may be to blame for is left to its own watchdog."""
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 15.0


class Stall(NamedTuple):
    """A finding with the looks that show it; `limit` is the silence in seconds after which it is acted on."""

    finding: Finding
    snapshot: Snapshot
    limit: float


class Watchdog:
    """Of one attempt.

    Args:
        limits: of the command; learns from the ranks while they run.
        looker: looks at the ranks.
        pids: process id by rank.
        waiting_seconds: how long all ranks together may wait at a barrier of the host.
        warn: told what is seen before it is acted on, and where it was wrong.
        act: False only warns.
        others: whether ranks of other hosts take part, which are watched there.
    """

    def __init__(
        self,
        limits: Limits,
        looker: Looker,
        pids: Mapping[int, int],
        *,
        waiting_seconds: float,
        warn: Callable[[str, Stall | None], None],
        act: bool = True,
        others: bool = False,
    ) -> None:
        self._limits, self._looker, self._pids = limits, looker, dict(pids)
        self._waiting_seconds, self._warn, self._act, self._others = waiting_seconds, warn, act, others
        self._last_tick = time.monotonic()
        self._allowance = 0.0
        self._newest = 0.0
        self._stopped_since: dict[int, float] = {}
        self._next_look = 0.0
        self._pause = _FIRST_PAUSE_SECONDS
        self._warned: Stall | None = None

    def tick(self, ranks: list[int]) -> Stall | None:
        """A stall to act on, or None. Call it some times a second with the ranks that still run; the others have ended."""
        now = time.monotonic()
        gap, self._last_tick = now - self._last_tick, now
        if gap > GAP_SECONDS:
            self._allowance = now
            self._stopped_since = {}
        beats = self._beats(ranks)
        newest = max((beat.time for beat in beats.values()), default=0.0)
        if newest > self._newest:
            self._newest = newest
            self._moves(now)
        if not beats or now < self._next_look:
            return None
        overdue = self._overdue(beats, now)
        stopped = self._stopped(ranks, now)
        if not overdue and not stopped:
            return None
        stall = self._judge(ranks, stopped)
        self._last_tick = time.monotonic()
        return stall

    def _beats(self, ranks: list[int]) -> dict[int, Beat]:
        beats = {}
        for rank in ranks:
            page = self._looker.page(rank)
            if page is not None and page.beat is not None:
                beats[rank] = page.beat
                self._limits.observe(rank, page.durations)
        return beats

    def _moves(self, now: float) -> None:
        """A rank has given a sign of life."""
        if self._warned is not None:
            finding = self._warned.finding
            self._warn(f"paceline: {screen.ranks_text(finding.ranks)} goes on: it was no stall ({finding.kind})", None)
        self._warned, self._next_look, self._pause = None, 0.0, _FIRST_PAUSE_SECONDS
        if self._looker.has_looked:
            self._looker.forget()

    def _overdue(self, beats: Mapping[int, Beat], now: float) -> bool:
        """Whether every rank has been silent for so long that a look is due."""
        working = [beat for beat in beats.values() if beat.allow_seconds != heartbeat.WAITING]
        if not working:
            return now - max(self._newest, self._allowance) > self._waiting_seconds
        return all(self._silent(beat, now) >= self._due(beat) for beat in working)

    def _due(self, beat: Beat) -> float:
        """Seconds of silence until the first look, then until the one that judges."""
        if not self._looker.has_looked:
            return self._limits.look_seconds(beat.section)
        return min(self._limits.of(beat.section), self._limits.certain_seconds)

    def _silent(self, beat: Beat, now: float) -> float:
        return now - max(beat.time + max(beat.allow_seconds, 0.0), self._allowance)

    def _stopped(self, ranks: list[int], now: float) -> list[int]:
        """Ranks whose process has been stopped for its time, whatever silence it was allowed."""
        states = {rank: sample(self._pids[rank]).state for rank in ranks}
        self._stopped_since = {r: self._stopped_since.get(r, now) for r, state in states.items() if state == "T"}
        return [r for r, since in self._stopped_since.items() if now - since >= self._limits.certain_seconds]

    def _judge(self, ranks: list[int], stopped: list[int]) -> Stall | None:
        first = not self._looker.has_looked
        snapshot = self._looker.look(list(self._pids))
        if not snapshot.ranks or (first and not stopped):
            return None
        states = [snapshot.ranks[rank].sample.state for rank in ranks if rank in snapshot.ranks]
        if any(state in (GONE, "Z", "t") for state in states):
            # One has ended this moment, which is seen without a look; or a debugger holds it, and who uses it knows why.
            return None
        finding = find(snapshot)
        view = snapshot.ranks[finding.ranks[0]]
        limit = self._limits.act_seconds(view.section, finding.doubt)
        if view.waiting and finding.kind == "storage":
            limit = self._waiting_seconds
        tells_after = self._limits.of(view.section)
        if self._others and finding.kind == "link" and not any(v.unacknowledged for v in snapshot.ranks.values()):
            # A rank of another host may hold up all of these: whoever watches it can tell, and comes first.
            limit = max(limit, ELSEWHERE * self._limits.act_seconds(view.section, "works"))
            tells_after *= ELSEWHERE
        stall = Stall(finding, snapshot, limit)
        long_stopped = finding.kind == "stopped" and set(stopped) >= set(finding.ranks)
        if self._act and (long_stopped or view.silent_seconds >= limit):
            return stall
        self._tell(stall, view.silent_seconds, tells_after)
        self._pause = min(_LONGEST_PAUSE_SECONDS, 1.2 * self._pause)
        # The next look comes when it can be acted on, so that nothing waits longer than its limit.
        left = limit - view.silent_seconds
        self._next_look = time.monotonic() + (min(left, self._pause) if left > 0 else self._pause)
        return None

    def _tell(self, stall: Stall, silent: float, after: float) -> None:
        """Once for each kind, where the silence is longer than `after` seconds."""
        told = self._warned
        if silent < after or (told is not None and told.finding.kind == stall.finding.kind):
            return
        self._warned = stall
        text = screen.sentence(stall.finding, stall.snapshot)
        then = (
            f"the run is ended after {format_seconds(stall.limit)}"
            if self._act
            else "recovery.on_stall = log: it goes on"
        )
        self._warn(f"paceline: nothing moves for {format_seconds(silent)}: {text}; {then}", stall)

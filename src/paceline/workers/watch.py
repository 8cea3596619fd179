"""Waits for a group of workers, shows what they print, and says how it ended.

On the first failure the others get a moment to tell what they saw, then are killed: a rank that waits in a collective, or
is stopped, never goes by itself, and one that trains would take SIGTERM for a request to end its step.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import IO, NamedTuple

from paceline.errors import Interrupted, PacelineError, Preempted
from paceline.units import format_seconds
from paceline.workers import decide, heartbeat, stop, verdict
from paceline.workers.config import DEFAULT_STALL_SECONDS
from paceline.workers.decide import Decision, Ending
from paceline.workers.heartbeat import Beat
from paceline.workers.interrupts import Interrupts
from paceline.workers.limits import Limits
from paceline.workers.look import Looker
from paceline.workers.oom import oom_kills
from paceline.workers.output import Output
from paceline.workers.signals import STOPPING
from paceline.workers.start import Worker, WorkerGroup
from paceline.workers.verdict import Cause, Verdict, is_plain
from paceline.workers.watchdog import Stall, Watchdog

SETTLE_SECONDS = 2.0
"""Time that the other ranks have, after an echo of a failure, to leave their own verdicts: one of them is its cause."""
KNOWN_SECONDS = 0.3
"""The same where the cause is known: a rank that failed by itself. Whatever failed before it has told by then. An error
that all ranks may find is waited for longer: whether they do decides whether another attempt is worth it."""
_STOPPED_EXITS = (Preempted.exit_code, Interrupted.exit_code)
_STOPPED_CODES = tuple(-number for number in STOPPING)
_TICK_SECONDS = 0.2
_CHUNK = 1 << 16


class GroupResult(NamedTuple):
    """How a group ended. `error` is None only where every rank ended with 0; `exits` are exit codes by rank."""

    exit_code: int
    error: PacelineError | None
    rank: int | None
    traceback: str | None
    verdicts: Mapping[int, Verdict]
    exits: list[int | None]
    seconds: float
    signal: int | None
    reached: int
    """Optimizer steps done, by the rank that told of most."""
    failed_at: float
    """CLOCK_MONOTONIC at which the first failure was seen, or the end."""
    asked: str | None
    """How somebody asked for the end, if that happened first."""
    fault: str | None = None
    """What it was, in one word of `suspects.Kind`, as far as it is known."""
    evidence: str | None = None
    """All that was seen of the ranks before they were ended."""
    cause: Cause = "own"
    """Whether it began on this host; see `decide.Decision`."""


def watch(
    group: WorkerGroup,
    *,
    stall_seconds: float | None = 600.0,
    start_seconds: float | None = 300.0,
    stop_seconds: float = 10.0,
    asked: Callable[[], str | None] = lambda: None,
    out: IO[str] | None = None,
    log_dir: Path | None = None,
    check: Callable[[], object] = lambda: None,
    elsewhere: Callable[[], PacelineError | None] = lambda: None,
    tells: bool = True,
    limits: Limits | None = None,
    act: bool = True,
    warn: Callable[[Stall], None] | None = None,
) -> GroupResult:
    """Wait until every worker has ended; none is left afterwards. The traceback, if any, is the last thing on `out`.

    SIGINT, SIGTERM, SIGUSR1 and SIGUSR2 to this process are passed on once, as SIGTERM; a second SIGINT or SIGTERM ends the
    workers at once. A worker that was asked to stop itself, and ended for that, has the others stop too.

    Args:
        stall_seconds: longest time in which no rank gives a sign of life; None: for ever, unless `limits` are given.
        start_seconds: longest time until all ranks have joined; None for programs that do not use `rendezvous.join`.
        stop_seconds: time that workers have to end after a signal.
        asked: looked at again and again; how a request to stop came that is no signal, or None.
        out: where workers' output goes; stderr unless given.
        log_dir: also keep each rank's whole output there.
        limits: learned over the attempts of a command, instead of the fixed `stall_seconds`.
        act: False tells of a stall and goes on waiting.
        warn: told of what looks like a stall before it is acted on.
        check: called again and again; what it raises ends the workers at once and passes through.
        elsewhere: called again and again; what broke on another host, where ranks of this one would wait in vain.
        tells: whether to print the traceback.
    """
    output = Output(out or sys.stderr, [worker.rank for worker in group.workers], log_dir)
    with group, Interrupts(asked) as interrupts, contextlib.closing(_Pipes(group, output)) as pipes:
        watched = _Watch(group, output, pipes, interrupts, start_seconds, stop_seconds, check, elsewhere, tells)
        if limits is not None or stall_seconds is not None:
            watched.limit_is_given = limits is None or limits.fixed_seconds is not None
            watched.watchdog = Watchdog(
                limits or Limits(stall_seconds), watched.looker, {w.rank: w.pid for w in group.workers},
                waiting_seconds=stall_seconds or DEFAULT_STALL_SECONDS, act=act, others=group.place.nodes > 1,
                warn=lambda text, stall: _warned(output, warn, text, stall),
            )  # fmt: skip
        return watched.run()


def _warned(output: Output, warn: Callable[[Stall], None] | None, text: str, stall: Stall | None) -> None:
    output.say(text)
    if warn is not None and stall is not None:
        warn(stall)


class _Pipes:
    """Reads the workers' pipes, and wakes up when a worker ends."""

    def __init__(self, group: WorkerGroup, output: Output) -> None:
        self._output = output
        self._selector = selectors.DefaultSelector()
        self._pidfds: list[int] = []
        for worker in group.workers:
            pipe = worker.process.stdout
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, worker.rank)
            if hasattr(os, "pidfd_open"):
                with contextlib.suppress(OSError):
                    self._pidfds.append(os.pidfd_open(worker.pid))
                    self._selector.register(self._pidfds[-1], selectors.EVENT_READ, None)

    def pump(self, timeout: float) -> bool:
        """Pass on what has been printed, waiting at most `timeout` seconds; whether there was anything."""
        fed = False
        for key, _ in self._selector.select(timeout):
            if key.data is None:
                self._selector.unregister(key.fileobj)
                continue
            data = self._read(key.fd)
            if data:
                fed = True
                self._output.feed(key.data, data)
            elif data is not None:
                self._selector.unregister(key.fileobj)
        self._output.release()
        return fed

    def drain(self) -> None:
        """Everything printed so far. A grandchild may hold a pipe open for ever, so its end is not waited for."""
        for _ in range(1000):
            if not self.pump(0):
                return

    def close(self) -> None:
        self._selector.close()
        for fd in self._pidfds:
            os.close(fd)

    @staticmethod
    def _read(fd: int) -> bytes | None:
        try:
            return os.read(fd, _CHUNK)
        except BlockingIOError:
            return None


class _Watch:
    """One call of `watch`."""

    def __init__(
        self,
        group: WorkerGroup,
        output: Output,
        pipes: _Pipes,
        interrupts: Interrupts,
        start_seconds: float | None,
        stop_seconds: float,
        check: Callable[[], object],
        elsewhere: Callable[[], PacelineError | None],
        tells: bool,
    ) -> None:
        self.group = group
        self.output = output
        self.pipes = pipes
        self.interrupts = interrupts
        self.start_seconds = start_seconds
        self.stop_seconds = stop_seconds
        self.check = check
        self.elsewhere = elsewhere
        self.tells = tells
        self.asked: str | None = None
        self.joined = start_seconds is None
        self.looker = Looker(group.folder, {worker.rank: worker.pid for worker in group.workers}, self._until)
        self.watchdog: Watchdog | None = None
        self.limit_is_given = False

    def run(self) -> GroupResult:
        decision: Decision | None = None
        while live := self.group.live():
            self.pipes.pump(_TICK_SECONDS)
            self.check()
            if self.interrupts.how is not None:
                decision = self._interrupted(self.interrupts.how)
                break
            if self._one_was_asked():
                decision = self._stop_all("a signal to one of the workers")
                break
            if any(self._failed(worker) for worker in self.group.workers):
                decision = self._failure()
                break
            if (error := self.elsewhere()) is not None:
                decision = Decision(error, None, cause="consequence")
                self._end()
                break
            if decision := self._late(live):
                self._end()
                break
        else:
            decision = self._ended()
        return self._result(decision)

    def _ended(self) -> Decision | None:
        if self._one_was_asked():
            return self._stop_all("a signal to one of the workers")
        return self._failure() if any(self._failed(worker) for worker in self.group.workers) else None

    def _failed(self, worker: Worker) -> bool:
        code = worker.poll()
        if code in (0, None):
            return False
        told = verdict.read_verdicts(self.group.folder).get(worker.rank)
        # Something broke in the interpreter's own shutdown, after the work was done.
        return told is None or told.exit != 0

    def _failure(self) -> Decision | None:
        """A worker has failed: collect what all of them know, then end them."""
        self.pipes.drain()
        self.output.mute()
        views = self.looker.look([w.rank for w in self.group.live() if w.rank not in self._told()]).ranks
        looked_at = time.monotonic()
        self._until(lambda: not self.group.live() or self._is_cause_known(looked_at), SETTLE_SECONDS)
        endings = self._endings()
        # No SIGTERM first: to a rank that trains it is a request to go on until the step is done, which never will be.
        self._end()
        stacks = {rank: view.stack or f"no stack: {view.sample.state}\n" for rank, view in views.items()}
        seen = {rank: view.seen for rank, view in views.items() if view.seen is not None}
        return decide.decide(endings, stacks, seen, self.group.world_size)

    def _is_cause_known(self, since: float) -> bool:
        """Whether a rank has failed by itself, and the others have had their moment since (CLOCK_MONOTONIC)."""
        first = decide.first_failure(self._endings())
        if first is None or first.cause != "own" or (first.verdict is not None and is_plain(first.verdict)):
            return False
        return time.monotonic() - max(first.time, since) > KNOWN_SECONDS

    def _one_was_asked(self) -> bool:
        """Whether a worker has ended because it was asked to stop: by its verdict, or by a signal before it listened."""
        ended = [worker for worker in self.group.workers if worker.poll() not in (0, None)]
        told = verdict.read_verdicts(self.group.folder) if ended else {}
        return any(
            told[worker.rank].exit in _STOPPED_EXITS if worker.rank in told else worker.poll() in _STOPPED_CODES
            for worker in ended
        )

    def _interrupted(self, how: str) -> Decision | None:
        within = format_seconds(self.stop_seconds)
        self._say(
            f"paceline: {how}: stopping {len(self.group.live())} workers within {within}; once more to leave at once"
        )
        stop.tell(self.group.folder, how)
        return self._stop_all(how)

    def _stop_all(self, how: str) -> Decision | None:
        """Have all workers stop in their time; what they say of it, unless somebody wants to leave at once."""
        self.asked = how
        for worker in self.group.live():
            worker.send(signal.SIGTERM)
        vain: Decision | None = None

        def is_over() -> bool:
            nonlocal vain
            live = self.group.live()
            if live and not self.interrupts.leaves:
                vain = self._in_vain(live)
            return not live or self.interrupts.leaves or vain is not None

        self._until(is_over, self.stop_seconds)
        killed = [worker.rank for worker in self.group.live()]
        endings = self._endings()
        self._end()
        if vain is not None:
            return decide.stopped_in_vain(how, vain)
        told = [e for e in endings if e.verdict is not None or e.returncode == 0]
        if len(told) == len(endings) and not any(e.failed for e in told):
            return None
        at_once = bool(killed) and self.interrupts.leaves
        return decide.stopped(told, how, killed, None if at_once else self.stop_seconds)

    def _in_vain(self, live: list[Worker]) -> Decision | None:
        """Why ranks that are to stop never will: one that does not move, here or on another host, ends no step."""
        if (error := self.elsewhere()) is not None:
            return Decision(error, None, cause="consequence")
        if not self.joined or self.watchdog is None:
            return None
        stall = self.watchdog.tick([worker.rank for worker in live])
        return decide.stalled(stall, self.group.world_size) if stall is not None else None

    def _late(self, live: list[Worker]) -> Decision | None:
        """A decision where the workers do not meet, or where none of them moves."""
        now = time.monotonic()
        beats = {worker.rank: self._beat(worker.rank) for worker in live}
        if not self.joined and self.start_seconds is not None:
            missing = [rank for rank, beat in beats.items() if beat is None or beat.phase in ("importing", "joining")]
            self.joined = not missing
            if missing and now - self.group.started_at > self.start_seconds:
                error = decide.not_started(self.start_seconds, missing, beats, self.group.world_size)
                return Decision(error, missing[0])
            if missing and self.limit_is_given:
                # The user's own limit is one of work; the start has another one.
                return None
        stall = self.watchdog.tick([worker.rank for worker in live]) if self.watchdog is not None else None
        return decide.stalled(stall, self.group.world_size) if stall is not None else None

    def _told(self) -> Collection[int]:
        return verdict.read_verdicts(self.group.folder)

    def _beat(self, rank: int) -> Beat | None:
        return heartbeat.read(self.group.folder / f"rank-{rank}.beat")

    def _endings(self) -> list[Ending]:
        verdicts = verdict.read_verdicts(self.group.folder)
        kills = oom_kills()
        out_of_memory = kills is not None and self.group.oom_kills is not None and kills > self.group.oom_kills
        return [
            Ending(
                rank=worker.rank,
                returncode=worker.poll(),
                monotonic=worker.ended_at or time.monotonic(),
                verdict=verdicts.get(worker.rank),
                tail=self.output.tail(worker.rank, 8),
                beat=self._beat(worker.rank),
                out_of_memory=out_of_memory,
            )
            for worker in self.group.workers
        ]

    def _end(self) -> None:
        """SIGKILL to those that are still there."""
        for worker in self.group.live():
            worker.send(signal.SIGKILL)
        for worker in self.group.workers:
            worker.process.wait()

    def _until(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition() and (left := deadline - time.monotonic()) > 0:
            self.pipes.pump(min(_TICK_SECONDS, left))

    def _result(self, decision: Decision | None) -> GroupResult:
        self.pipes.drain()
        self.output.close()
        if decision is not None and decision.traceback and self.tells:
            self._say(decision.traceback.rstrip())
        return GroupResult(
            exit_code=0 if decision is None else decision.error.exit_code,
            error=None if decision is None else decision.error,
            rank=None if decision is None else decision.rank,
            traceback=None if decision is None else decision.traceback,
            verdicts=verdict.read_verdicts(self.group.folder),
            exits=[worker.poll() for worker in self.group.workers],
            seconds=time.monotonic() - self.group.started_at,
            signal=self.interrupts.received[0] if self.interrupts.received else None,
            reached=max((beat.step for w in self.group.workers if (beat := self._beat(w.rank))), default=-1),
            failed_at=min(
                (w.ended_at for w in self.group.workers if w.poll() and w.ended_at), default=time.monotonic()
            ),
            asked=self.asked,
            fault=None if decision is None else decision.fault,
            evidence=None if decision is None else decision.evidence,
            cause="own" if decision is None else decision.cause,
        )

    def _say(self, text: str) -> None:
        self.output.say(text)

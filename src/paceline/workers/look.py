"""Takes a look at all ranks of this host: their pages, what they answer, what the system says of them and their helpers."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from paceline.workers import heartbeat, pulse, sample, stacks
from paceline.workers.heartbeat import Page
from paceline.workers.pulse import Answer
from paceline.workers.sample import Helper
from paceline.workers.suspects import PULSE_SILENT_SECONDS, RankView, Snapshot

ANSWER_SECONDS = 0.5
"""A pulse answers within its period of 0.2 s."""

Wait = Callable[[Callable[[], bool], float], None]
"""Until a condition holds, at most so many seconds."""


class Looker:
    """Looks at the ranks of one group.

    Args:
        folder: where the workers' pages lie.
        pids: process id by rank.
        wait: passes the time meanwhile.
    """

    def __init__(self, folder: Path, pids: Mapping[int, int], wait: Wait) -> None:
        self._folder, self._pids, self._wait = folder, dict(pids), wait
        self._asked = 0
        self._before: tuple[float, dict[int, RankView]] = (0.0, {})

    def page(self, rank: int) -> Page | None:
        return heartbeat.read_page(page_path(self._folder, rank))

    def forget(self) -> None:
        """The ranks have moved: the next look has none before it."""
        self._before = (0.0, {})

    @property
    def has_looked(self) -> bool:
        return bool(self._before[1])

    def look(self, ranks: list[int]) -> Snapshot:
        """The ranks now, beside the look before. Takes up to half a second, and one more where a rank does not answer."""
        answers = self._answers(ranks)
        texts = self._stacks(ranks, answers)
        now = time.monotonic()
        views = {rank: view for rank in ranks if (view := self._view(rank, answers, texts, now)) is not None}
        then, before = self._before
        self._before = (now, views)
        return Snapshot(platform.node(), views, before, now - then if before else 0.0)

    def _answers(self, ranks: list[int]) -> dict[int, Answer]:
        self._asked += 1
        for rank in ranks:
            heartbeat.ask(page_path(self._folder, rank), self._asked)
        late = set(ranks)

        dumb: set[int] = set()

        def all_answered() -> bool:
            for rank in list(late):
                page = self.page(rank)
                if page is not None and page.pulse is not None and page.pulse.answered == self._asked:
                    late.discard(rank)
                elif _is_silent(page) or sample.sample(self._pids[rank]).state in (sample.GONE, "Z", "T"):
                    dumb.add(rank)
            return late <= dumb

        self._wait(all_answered, ANSWER_SECONDS)
        found = {rank: pulse.read_answer(pulse.answer_path(self._folder, rank)) for rank in ranks if rank not in late}
        return {rank: answer for rank, answer in found.items() if answer is not None}

    def _stacks(self, ranks: list[int], answers: Mapping[int, Answer]) -> dict[int, str]:
        """Of those without an answer, by a signal: it works while the interpreter's lock is held."""
        texts = {rank: answer.stacks for rank, answer in answers.items()}
        silent = {rank: self._pids[rank] for rank in ranks if rank not in answers}
        running = {rank: pid for rank, pid in silent.items() if stacks.state(pid) == "alive"}
        return texts | stacks.collect({rank: pid for rank, pid in running.items() if self._listens(rank)}, self._folder)

    def _listens(self, rank: int) -> bool:
        return stacks.stacks_path(self._folder, rank).exists() and self.page(rank) is not None

    def _view(self, rank: int, answers: Mapping[int, Answer], texts: Mapping[int, str], now: float) -> RankView | None:
        page, pid = self.page(rank), self._pids[rank]
        if page is None or page.beat is None:
            return None
        beat, answer = page.beat, answers.get(rank)
        waiting = beat.allow_seconds == heartbeat.WAITING
        age = now - page.pulse.time if page.pulse is not None else None
        # A rank that has just answered lives, however late its stamp.
        age = 0.0 if age is not None and answer is not None and age > PULSE_SILENT_SECONDS else age
        return RankView(
            rank, beat.step, beat.phase, beat.section, now - beat.time - (0.0 if waiting else beat.allow_seconds), waiting,
            sample.sample(pid), age, texts.get(rank, ""), answer.seen if answer is not None else None,
            self._helpers(pid), tuple(sample.unacknowledged(pid)), frozenset(sample.own_addresses(pid)),
        )  # fmt: skip

    def _helpers(self, pid: int) -> tuple[Helper, ...]:
        return tuple(helper._replace(stack=self._stack_of(helper)) for helper in sample.helpers(pid))

    def _stack_of(self, helper: Helper) -> str:
        """Of a helper that listens for the signal; the others know nothing of it and would end by it."""
        path = stacks.helper_path(self._folder, helper.sample.pid)
        if helper.sample.state in ("T", "Z") or not path.exists():
            return ""
        os.truncate(path, 0)
        with contextlib.suppress(ProcessLookupError):
            os.kill(helper.sample.pid, stacks.STACK_SIGNAL)
        deadline = time.monotonic() + 0.1
        while time.monotonic() < deadline:
            if text := path.read_text(errors="replace").strip("\0"):
                return text
            time.sleep(0.005)
        return ""


def _is_silent(page: Page | None) -> bool:
    """Whether a rank's pulse has stopped long ago: it will not answer."""
    return page is None or page.pulse is None or time.monotonic() - page.pulse.time > PULSE_SILENT_SECONDS


def page_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.beat"

"""What a worker's second thread leaves, what the system says of it, and when the watchdog looks: without torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.units import format_seconds
from paceline.workers import heartbeat, pulse, recorder, sample, watchdog
from paceline.workers.durations import durations_of
from paceline.workers.heartbeat import Beat, Page, Pulse
from paceline.workers.limits import STEP_FLOOR_SECONDS, Limits
from paceline.workers.look import Looker, page_path
from paceline.workers.recorder import Entry, Seen
from paceline.workers.sample import Sample
from paceline.workers.suspects import RankView, Snapshot
from paceline.workers.watchdog import Stall, Watchdog


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Path]:
    path = page_path(tmp_path, 0)
    heartbeat.open_file(path)
    yield path
    heartbeat._pages.clear()
    heartbeat.beat(-1, "starting")


def test_sections_are_counted_with_the_first_steps_apart_and_waits_left_out(page: Path) -> None:
    for step in range(10):
        heartbeat.beat(step, "waiting for data", section="data")
        heartbeat.beat(step, "training step")
        with heartbeat.waiting("waiting for all ranks"):
            time.sleep(0.005)
        found = heartbeat.read(page)
        assert found is not None and (found.phase, found.section) == (
            "training step",
            "compile" if step < 3 else "step",
        )
    read = heartbeat.read_page(page)
    assert read is not None and read.pulse is None
    numbers = {section: durations.number for section, durations in read.durations.items() if durations.number}
    # A step is cut in two by its wait; the last part still lasts.
    assert numbers == {"data": 10, "compile": 6, "step": 13}
    assert read.durations["step"].longest < 0.005


def test_a_pulse_answers_with_its_threads_and_its_collectives(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = pulse.answer_path(page.parent, 0)
    seen = Seen((Entry("world", 3, "all_reduce", "[[4]]", True),), {"world": (0, 1)})
    monkeypatch.setattr(recorder, "seen", lambda: seen)
    heartbeat.ask(page, 5)
    assert pulse.tick(path, 1, 0) == 5
    read, answer = heartbeat.read_page(page), pulse.read_answer(path)
    assert read is not None and read.pulse is not None and read.pulse.answered == 5
    assert (
        answer is not None
        and answer.seen == seen
        and str(seen.entries[0]) == "all_reduce number 3 (sizes [[4]]) in group world"
    )
    path.unlink()
    assert pulse.tick(path, 2, 5) == 5 and not path.exists()
    assert pulse.read_answer(path) is None


def test_a_recorder_that_has_changed_is_no_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine:
        def _dump_fr_trace_json(self, *_: bool) -> str:
            return '{"entries": [{"other": 1}]}'

    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", Engine())  # type: ignore[arg-type]
    assert recorder.seen() is None and recorder.last_entered() is None


def test_a_process_is_seen_with_its_state_and_its_wait() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; sum(range(10**7)); time.sleep(60)"])
    try:
        deadline = time.monotonic() + 10
        while "nanosleep" not in sample.sample(child.pid).waits_in and time.monotonic() < deadline:
            time.sleep(0.02)
        found = sample.sample(child.pid)
        assert (found.state, found.main_state) == ("S", "S") and "nanosleep" in found.waits_in and found.cpu_seconds > 0
        os.kill(child.pid, signal.SIGSTOP)
        while sample.sample(child.pid).state != "T" and time.monotonic() < deadline:
            time.sleep(0.02)
        assert sample.sample(child.pid).state == "T"
        assert child.pid in [helper.sample.pid for helper in sample.helpers(os.getpid())]
    finally:
        child.kill()
        child.wait()
    assert sample.sample(child.pid).state == sample.GONE


def test_the_kernels_addresses_are_read() -> None:
    assert sample._address("0100007F") == "127.0.0.1"
    assert sample._address("0000000000000000FFFF00000100000A") == "10.0.0.1"


class Played:
    """Two ranks whose beats and looks are written down; the clock is the test's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.now = 1000.0
        self.beats = {rank: Beat(9, "training step", 1000.0, 0.0, 40, "step") for rank in (0, 1)}
        self.state = "S"
        self.cpu = 0.0
        self.said: list[str] = []
        self.has_looked = False
        limits = Limits()
        for rank in (0, 1):
            limits.observe(rank, {"step": durations_of([0.1] * 100)})
        monkeypatch.setattr(limits, "observe", lambda *_: None)
        monkeypatch.setattr(watchdog.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(watchdog, "sample", lambda pid: Sample(pid, self.state if pid == 1 else "S", "S", self.cpu))
        self.limits = limits
        self.dog = Watchdog(
            limits, self, {0: 0, 1: 1}, waiting_seconds=600.0, warn=lambda text, stall: self.said.append(text), **options,  # type: ignore[arg-type]
        )  # fmt: skip

    def page(self, rank: int) -> Page:
        return Page(self.beats[rank], Pulse(5, self.now, 0), {})

    def forget(self) -> None:
        self.has_looked = False

    def look(self, ranks: list[int]) -> Snapshot:
        self.has_looked = True
        views = {r: self._view(r) for r in ranks}
        return Snapshot(
            "vm", views, {r: v._replace(sample=v.sample._replace(main_cpu_seconds=0.0)) for r, v in views.items()}, 1.0
        )

    def _view(self, rank: int) -> RankView:
        beat = self.beats[rank]
        running = Seen((Entry("world", 5, "all_reduce", "[[4]]", rank == 0),) if rank == 0 else (), {"world": (0, 1)})
        state = Sample(rank, self.state if rank == 1 else "S", "S", self.cpu if rank == 1 else 0.0)
        return RankView(rank, beat.step, beat.phase, beat.section, self.now - beat.time - max(0.0, beat.allow_seconds),
                        beat.allow_seconds == heartbeat.WAITING, state, 0.1, "", running)  # fmt: skip

    def until(self, seconds: float, *, each: Callable[[], None] = lambda: None) -> Stall | None:
        """Ticks until so many seconds have passed, or a stall is acted on."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.2
            each()
            if (stall := self.dog.tick([0, 1])) is not None:
                return stall
        return None

    def all_beat(self) -> None:
        self.beats = {rank: beat._replace(time=self.now, beats=beat.beats + 1) for rank, beat in self.beats.items()}


# R12
def test_an_idle_rank_is_named_and_acted_on_within_three_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch)
    assert played.until(60.0, each=played.all_beat) is None and played.said == []
    stall = played.until(10.0)
    assert stall is not None and stall.finding.kind == "missing-collective" and stall.finding.ranks == (1,)
    assert played.now - played.beats[1].time < 3.0


def test_a_stopped_rank_is_acted_on_in_any_section(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch)
    played.beats = {rank: beat._replace(allow_seconds=600.0, section="save") for rank, beat in played.beats.items()}
    assert played.until(30.0) is None
    played.state = "T"
    began = played.now
    stall = played.until(10.0)
    assert stall is not None and stall.finding.kind == "stopped" and played.now - began < 3.0


# R14
def test_work_is_told_of_first_and_that_it_went_on(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch)
    played.cpu = 1.0
    assert played.until(8.0) is None
    (told,) = played.said
    assert (
        "nothing moves for" in told
        and "spinning" in told
        and f"the run is ended after {format_seconds(4 * STEP_FLOOR_SECONDS)}" in told
    )
    played.until(1.0, each=played.all_beat)
    assert played.said[1:] == ["paceline: rank 1 goes on: it was no stall (spinning)"]
    stall = played.until(30.0)
    assert stall is not None and 4 * STEP_FLOOR_SECONDS <= played.now - played.beats[1].time < 12.0


def test_ranks_that_all_wait_for_another_host_are_left_to_its_own_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended_after(**options: bool) -> float:
        played = Played(monkeypatch, **options)
        monkeypatch.setattr(played, "_view", lambda rank: Played._view(played, 0)._replace(rank=rank))
        stall = played.until(900.0)
        assert stall is not None and stall.finding.kind == "link" and len(played.said) == 1
        return played.now - played.beats[0].time

    assert ended_after() < 12.0
    # Longer than what is in doubt, or works, may take there.
    assert ended_after(others=True) > 1.5 * 10.0 * STEP_FLOOR_SECONDS
    # It is on record there within three seconds: nothing is said of it here before that.
    played = Played(monkeypatch, others=True)
    monkeypatch.setattr(played, "_view", lambda rank: Played._view(played, 0)._replace(rank=rank))
    assert played.until(3.0) is None and played.said == []


def test_log_only_never_acts(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch, act=False)
    assert played.until(300.0) is None
    assert len(played.said) == 1 and "recovery.on_stall = log" in played.said[0]


def test_a_machine_that_stood_still_is_held_against_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch)
    played.now += 3600.0
    assert played.until(2.0) is None
    assert played.until(10.0) is not None


def test_a_wait_on_the_host_or_an_allowed_silence_is_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch)
    played.beats[0] = played.beats[0]._replace(allow_seconds=heartbeat.WAITING)
    played.beats[1] = played.beats[1]._replace(allow_seconds=100.0, section="save")
    assert played.until(100.0) is None and played.said == []
    played.beats[1] = played.beats[1]._replace(allow_seconds=heartbeat.WAITING)
    assert played.until(400.0) is None
    assert played.until(200.0) is not None


@pytest.mark.parametrize("state", ["t", "Z"])
def test_a_rank_under_a_debugger_or_just_ended_is_left_alone(monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    played = Played(monkeypatch)
    played.state = state
    assert played.until(60.0) is None


def test_a_look_takes_no_longer_for_ranks_that_cannot_answer(tmp_path: Path) -> None:
    began = time.monotonic()

    def wait(condition: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not condition() and time.monotonic() < end:
            time.sleep(0.01)

    assert Looker(tmp_path, {0: 2**22 - 1}, wait).look([0]).ranks == {}
    assert time.monotonic() - began < 0.4

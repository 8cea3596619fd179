"""Timers: the parts of a step add up to it, whatever is nested in what."""

from __future__ import annotations

import pytest

from paceline.telemetry.timers import StepTimers


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_marks_and_blocks_add_up_to_the_step() -> None:
    clock = Clock()
    timers = StepTimers(clock=clock, thread_clock=Clock())
    timers.begin(1)
    clock.now += 1
    timers.mark("data_wait")
    clock.now += 0.5
    with timers.part("backward"):
        clock.now += 2
        with timers.part("reduce_exposed"):
            clock.now += 4
        clock.now += 8
    with timers.part("forward"):
        clock.now += 16
    with timers.part("forward"):
        clock.now += 32
    clock.now += 64
    seconds, parts = timers.end()
    assert parts == {"data_wait": 1, "other": 64.5, "backward": 10, "reduce_exposed": 4, "forward": 48}
    assert seconds == sum(parts.values()) == 127.5


def test_a_window_has_the_parts_without_the_waits_in_them_as_well() -> None:
    clock, waited = Clock(), Clock()
    timers = StepTimers(clock=clock, waited=waited)
    for step, late in ((1, 2.0), (2, 0.5)):
        timers.begin(step)
        clock.now += 3 + late
        waited.now += late
        timers.mark("forward")
        clock.now += 4
        timers.mark("optimizer")
        # Between two steps: of no step.
        timers.end()
        clock.now += 7
        waited.now += 7
    parts, own = timers.window()
    assert (parts["forward"].sum, parts["forward"].max, parts["forward"].worst_step) == (8.5, 5.0, 1)
    assert list(own) == ["forward"] and (own["forward"].sum, own["forward"].max) == (6.0, 3.0)


def test_a_block_that_raises_still_counts() -> None:
    clock = Clock()
    timers = StepTimers(clock=clock)
    timers.begin(1)

    def fail() -> None:
        with timers.part("forward"):
            clock.now += 1
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    clock.now += 1
    assert timers.end()[1] == {"forward": 1, "other": 1}


def test_windows_name_the_worst_step_and_start_anew() -> None:
    clock = Clock()
    timers = StepTimers(clock=clock)
    for step, seconds in ((1, 1.0), (2, 5.0), (3, 3.0)):
        timers.begin(step)
        clock.now += seconds
        timers.mark("forward")
        timers.end()
    summary = timers.window()[0]["forward"]
    assert (summary.count, summary.sum, summary.min, summary.max, summary.worst_step) == (3, 9.0, 1.0, 5.0, 2)
    assert timers.window() == ({}, {})


def test_the_device_is_waited_for_in_every_nth_step_alone() -> None:
    clock, waits = Clock(), []

    def synchronize() -> None:
        waits.append(clock.now)
        clock.now += 1

    timers = StepTimers(synchronize, synchronize_every=3, clock=clock)
    measured = []
    for step in range(1, 8):
        timers.begin(step)
        with timers.part("forward"):
            clock.now += 1
        seconds, parts = timers.end()
        if parts:
            measured.append(step)
            assert seconds == sum(parts.values())
            assert parts["forward"] == 2
    assert measured == [1, 4, 7]
    assert timers.window()[0]["forward"].count == 3
    assert len(waits) == 3 * 4


def test_telemetry_knows_what_it_costs() -> None:
    clock, thread = Clock(), Clock()
    timers = StepTimers(clock=clock, thread_clock=thread)
    timers.begin(1)
    for name in ("records", "line", "records"):
        with timers.overhead(name):
            clock.now += 2
            thread.now += 1
    assert timers.end()[1]["telemetry"] == 6
    assert timers.overhead_seconds == {"records": 2, "line": 1}
    assert timers.overhead_total_seconds == 3

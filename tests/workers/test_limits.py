"""How long a rank may be silent, from what was seen."""

from __future__ import annotations

import pytest

from paceline.workers.durations import SECTIONS, durations_of
from paceline.workers.limits import STARTING_SECONDS, STEP_FLOOR_SECONDS, Limits


def limits_of(*steps: float, **sections: list[float]) -> Limits:
    limits = Limits()
    limits.observe(0, {"step": durations_of(steps), **{name: durations_of(seen) for name, seen in sections.items()}})  # type: ignore[dict-item]
    return limits


def test_a_quantile_of_counts_is_that_of_the_durations_to_seven_percent() -> None:
    seconds = sorted(0.002 * 1.03**n for n in range(300))
    counted = durations_of(seconds)
    for share in (0.5, 0.9, 0.99):
        assert counted.quantile(share) == pytest.approx(seconds[round(share * 300) - 1], rel=0.08)
    assert counted.quantile(1.0) == pytest.approx(seconds[-1], rel=0.08) and counted.longest == seconds[-1]
    assert durations_of([]).quantile(0.99) == 0.0
    assert durations_of([1e-9, 1e9]).number == 2


def test_before_anything_is_seen_limits_are_generous() -> None:
    limits = Limits()
    assert {section: limits.of(section) for section in SECTIONS} == STARTING_SECONDS
    assert limits.certain_seconds == 10.0
    # Seven steps are not enough.
    assert limits_of(*[0.1] * 7).of("step") == STARTING_SECONDS["step"]


def test_steps_are_held_to_under_three_seconds_or_five_times_their_percentile() -> None:
    assert limits_of(*[0.1] * 200).of("step") == STEP_FLOOR_SECONDS
    learned = limits_of(*[2.0] * 200)
    assert 4.0 * 2.0 < learned.of("step") < 5.0 * 2.0 and learned.certain_seconds == learned.of("step")
    # One slow step of a hundred and more changes nothing.
    assert limits_of(*[2.0] * 200, 20.0).of("step") == learned.of("step")
    # A wait for data may take as long as a step.
    assert limits_of(*[2.0] * 200, data=[0.001] * 200).of("data") == learned.of("step")


# R14
def test_a_step_of_ten_times_the_usual_length_is_never_ended() -> None:
    for usual in (0.1, 1.0, 5.0):
        limits = limits_of(*[usual] * 200)
        assert min(limits.act_seconds("step", doubt) for doubt in ("asleep", "busy", "storage", "works")) > min(
            10 * usual, 2.4
        )
        if usual >= 1.0:
            assert limits.act_seconds("step", "asleep") > 10 * usual
            assert limits.act_seconds("step", "busy") > 10 * usual


def test_long_sections_are_held_to_five_times_the_longest_seen() -> None:
    limits = limits_of(*[0.1] * 100, evaluation=[30.0, 40.0], save=[20.0], compile=[1.0])
    assert (limits.of("evaluation"), limits.of("save"), limits.of("compile")) == (200.0, 100.0, 60.0)
    assert limits.of("restore") == STARTING_SECONDS["restore"]
    # What is certain does not wait for them.
    assert limits.act_seconds("save", "none") == limits.certain_seconds == STEP_FLOOR_SECONDS


def test_doubt_waits_and_waits_longer_after_it_was_costly() -> None:
    limits = limits_of(*[0.1] * 100)
    assert [limits.act_seconds("step", doubt) for doubt in ("none", "asleep", "busy", "storage")] == pytest.approx(
        [times * STEP_FLOOR_SECONDS for times in (1, 1, 4, 10)]
    )
    # A compiler in the middle of a run.
    assert limits.act_seconds("step", "works") == STARTING_SECONDS["compile"]
    limits.doubt_was_costly()
    assert [limits.act_seconds("step", doubt) for doubt in ("none", "asleep", "busy", "storage")] == pytest.approx(
        [times * STEP_FLOOR_SECONDS for times in (1, 4, 16, 40)]
    )


def test_attempts_add_up() -> None:
    limits = limits_of(*[0.1] * 5)
    limits.next_attempt()
    limits.observe(0, {"step": durations_of([0.1] * 2)})
    limits.observe(0, {"step": durations_of([0.1] * 5)})
    assert limits.seen("step").number == 10 and limits.of("step") == STEP_FLOOR_SECONDS


def test_the_users_own_limit_is_the_only_one() -> None:
    limits = Limits(7.0)
    limits.observe(0, {"step": durations_of([0.1] * 100)})
    assert {limits.of(section) for section in SECTIONS} == {7.0}
    assert limits.certain_seconds == limits.act_seconds("step", "storage") == 7.0 and limits.look_seconds("step") == 3.5

"""The policy of attempts, without a process: what follows a failure, and when it is given up."""

from __future__ import annotations

import itertools
import random

import pytest

from paceline import errors
from paceline.errors import NoProgress, PacelineError, Stalled, WorkerFailed
from paceline.workers.supervise import LONGEST_BACKOFF_SECONDS, Attempt, End, Restart, Supervision


def failed(
    start: int | None = None, reached: int = 0, what: str | None = "ValueError", error: PacelineError | None = None
) -> Attempt:
    error = error or WorkerFailed(f"rank 1 raised {what}")
    return Attempt(error, signature=what, start=start, reached=reached, traceback=f"traceback of {what}")


def walk(policy: Supervision, attempts: list[Attempt]) -> list[Restart | End]:
    """What followed each of them; nothing follows an end."""
    followed: list[Restart | End] = []
    for attempt in attempts:
        followed.append(policy.after(attempt))
        if isinstance(followed[-1], End):
            break
    return followed


def given_up(followed: list[Restart | End]) -> End:
    end = followed[-1]
    assert isinstance(end, End) and isinstance(end.error, NoProgress) and end.error.exit_code == 93
    return end


def test_a_run_that_is_done_ends() -> None:
    assert Supervision().after(Attempt(None, start=0, reached=8)) == End(None)


@pytest.mark.parametrize("code", [2, 74, 75, 77, 78, 79, 93, 130])
def test_what_would_only_be_repeated_or_was_asked_for_is_not_retried(code: int) -> None:
    kinds: list[type[PacelineError]] = PacelineError.__subclasses__()
    error = next(kind for kind in kinds if kind.exit_code == code)("no")
    end = Supervision().after(failed(0, 5, error=error))
    assert isinstance(end, End) and end.error is error


@pytest.mark.parametrize("kind", [WorkerFailed, errors.OutOfMemory, Stalled])
def test_what_may_pass_is_retried_at_once_the_first_time(kind: type[PacelineError]) -> None:
    assert Supervision().after(failed(0, 5, error=kind("went"))) == Restart(0.0, "went", False)


def test_a_stall_ends_the_run_where_that_is_wanted() -> None:
    stall = failed(0, 5, error=Stalled("rank 1 stands still"))
    end = Supervision(restart_stalled=False).after(stall)
    assert isinstance(end, End) and end.error is stall.error
    assert Stalled.exit_code == 76


def test_a_policy_that_all_ranks_agree_on_is_not_a_failure_of_the_machine() -> None:
    error = PacelineError("5 steps in a row were not finite")
    assert Supervision().after(failed(0, 5, error=error)._replace(agreed=True)) == End(error, "traceback of ValueError")
    assert isinstance(Supervision().after(failed(0, 5, error=error)), Restart)


def test_nothing_starts_again_after_a_signal_to_stop() -> None:
    attempt = failed(0, 5)._replace(told_to_stop=True)
    assert Supervision().after(attempt) == End(attempt.error, attempt.traceback)


def test_without_restarts_an_error_keeps_its_code() -> None:
    attempt = failed(0, 5)
    assert Supervision(0).after(attempt) == End(attempt.error, attempt.traceback)
    assert attempt.error is not None and "restart" not in attempt.error.message


# BL-75
def test_a_job_that_cannot_start_is_tried_twice() -> None:
    end = given_up(walk(Supervision(5), [failed()] * 5))
    assert end.error is not None and end.traceback == "traceback of ValueError"
    assert "twice the same failure, and no step after the restart" in end.error.message
    assert "rank 1 raised ValueError" in end.error.message and end.error.values["attempts"] == 2


# BL-75
def test_a_failure_at_one_step_is_tried_three_times() -> None:
    followed = walk(Supervision(5), [failed(0, 7), failed(5, 7), failed(5, 7), failed(5, 7)])
    assert len(followed) == 3 and "three times the same failure at the same step (7)" in str(given_up(followed).error)


# BL-75
def test_a_failure_that_passes_costs_one_restart() -> None:
    assert walk(Supervision(5), [failed(0, 7), Attempt(None, start=5, reached=20)]) == [
        Restart(0.0, "rank 1 raised ValueError"), End(None),
    ]  # fmt: skip


# R21
def test_three_attempts_without_a_new_step_end_with_the_first_traceback() -> None:
    kinds = ["A", "B", "C", "D", "E"]
    followed = walk(Supervision(9), [failed(0, 7, kinds[0]), *(failed(5, 7, kind) for kind in kinds[1:])])
    end = given_up(followed)
    assert len(followed) == 4 and end.traceback == "traceback of A"
    assert "3 attempts without a new step after step 7; the first failure was: rank 1 raised A" in str(end.error)


def test_the_backoff_doubles_from_the_second_restart_on_and_has_an_end() -> None:
    # Three attempts without a new step are the end, so that there are never more than three waits.
    for first, waits in ((8.0, [0.0, 8.0, 16.0]), (40.0, [0.0, 40.0, LONGEST_BACKOFF_SECONDS]), (0.0, [0.0] * 3)):
        followed = walk(Supervision(9, first), [failed(0, 7, None)] * 9)
        assert [f.delay_seconds for f in followed if isinstance(f, Restart)] == waits


def test_a_new_step_renews_the_budget_and_an_old_one_does_not() -> None:
    policy = Supervision(1)
    assert all(isinstance(f, Restart) for f in walk(policy, [failed(n, n + 1) for n in range(200)]))
    end = policy.after(failed(150, 190))
    assert isinstance(end, End) and end.error is not None and end.error.exit_code == 1
    assert "(1 restart without a new step, as many as may be)" in end.error.message


def test_a_run_that_gets_on_may_fail_in_the_same_way_for_ever() -> None:
    assert all(isinstance(f, Restart) for f in walk(Supervision(3), [failed(n, n + 5) for n in range(0, 500, 5)]))


def test_a_resumed_command_is_measured_by_where_it_began() -> None:
    policy = Supervision(3)
    followed = walk(policy, [failed(100, 100), failed(100, 101), failed(100, 101), failed(100, 101), failed(100, 101)])
    assert len(followed) == 4, "the failure before the first step of the command is not held against the one after it"


def test_deaths_from_outside_are_never_the_same_failure_twice() -> None:
    followed = walk(Supervision(9), [failed(what=None), failed(what=None), failed(0, 3, None), failed(0, 3, None)])
    assert all(isinstance(f, Restart) and not f.again for f in followed)
    assert len(walk(Supervision(9), [failed(what=None)] * 9)) == 3, "and three of them without a step end the run"


def test_what_was_told_is_not_told_again() -> None:
    first, second = walk(Supervision(5), [failed(0, 7), failed(5, 7)])
    assert isinstance(first, Restart) and isinstance(second, Restart)
    assert (first.again, second.again) == (False, True)


@pytest.mark.parametrize("seed", range(20))
def test_every_walk_ends_and_never_by_more_than_the_budget_without_a_step(seed: int) -> None:
    """Against a count by hand over random walks."""
    draw = random.Random(seed)
    budget = draw.randrange(6)
    policy, furthest, idle, series = Supervision(budget), 0, 0, 0
    for count in itertools.count(1):
        start = draw.choice([None, furthest])
        reached = furthest if start is None else furthest + draw.choice([0, 0, 1])
        outcome = policy.after(failed(start, reached, draw.choice(["A", "B", "C", None])))
        if start is not None and reached > max(furthest, start):
            idle, series = 0, 1
        else:
            idle, series = idle + 1, series + 1
        furthest = reached
        if isinstance(outcome, End):
            assert outcome.error is not None
            is_93 = outcome.error.exit_code == 93
            assert is_93 or series > budget
            break
        assert series <= budget and idle < 3
        assert count < 2000 or budget == 0
        if count > 500:
            break

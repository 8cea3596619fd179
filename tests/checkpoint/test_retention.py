"""Which checkpoints may go."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from paceline.checkpoint.retention import Kept, to_remove


def plain(*steps: int) -> list[Kept]:
    return [Kept(step) for step in steps]


def test_the_newest_stay() -> None:
    assert to_remove(plain(10, 20, 30, 40), keep=2) == [10, 20]
    assert to_remove(plain(40, 10, 30, 20), keep=2) == [10, 20]
    assert to_remove(plain(10), keep=1) == [] and to_remove([], keep=3) == []
    with pytest.raises(ValueError, match="keep = 0"):
        to_remove(plain(1), keep=0)


def test_the_one_that_was_resumed_from_stays() -> None:
    assert to_remove(plain(10, 20, 30, 40), keep=1, protected={20}) == [10, 30]


def test_the_best_stay_besides() -> None:
    steps = [Kept(10, 3.0), Kept(20, 1.0), Kept(30, 2.0), Kept(40, 1.5), Kept(50, None)]
    assert to_remove(steps, keep=1, keep_best=2) == [10, 30]
    assert to_remove(steps, keep=2, keep_best=1) == [10, 30]
    assert to_remove([Kept(10, math.nan), Kept(20, -math.inf), Kept(30)], keep=1, keep_best=2) == [10, 20]
    assert to_remove([Kept(10, 1.0), Kept(20, 1.0), Kept(30, 2.0)], keep=1, keep_best=1) == [10]


def test_nothing_goes_for_one_that_was_not_verified() -> None:
    # R5: keep = 1, the newest is bad or not read back yet.
    assert to_remove([Kept(10), Kept(20, verified=False)], keep=1) == []
    assert to_remove([Kept(10), Kept(20), Kept(30, verified=False)], keep=1) == [10]
    assert to_remove([Kept(10, verified=False), Kept(20, verified=False)], keep=1) == []
    assert to_remove([Kept(10, 0.1, verified=False), Kept(20, 2.0), Kept(30)], keep=1, keep_best=1) == [10]


def test_the_newest_verified_one_always_stays() -> None:
    dice = random.Random(5)
    for _ in range(2000):
        steps = [
            Kept(step, dice.choice([None, math.nan, dice.random()]), verified=dice.random() < 0.7)
            for step in dice.sample(range(100), dice.randint(0, 12))
        ]
        keep, best = dice.randint(1, 4), dice.randint(0, 3)
        protected = set(dice.sample(range(100), 3))
        gone = to_remove(steps, keep, best, protected)
        verified = sorted(kept.step for kept in steps if kept.verified)
        assert not set(gone) & (set(verified[-keep:]) | protected)
        assert gone == sorted(gone) and set(gone) <= {kept.step for kept in steps}
        assert not verified or all(step < verified[-1] for step in gone)
        # Removing in any number of goes ends the same way.
        left = [kept for kept in steps if kept.step not in gone]
        assert to_remove(left, keep, best, protected) == []


def test_r5_fifty_saves_of_which_every_other_one_fails() -> None:
    held: list[Kept] = []
    for step in itertools.count(1):
        held.append(Kept(step, verified=step % 2 == 0))
        gone = to_remove(held, keep=1)
        held = [kept for kept in held if kept.step not in gone]
        assert step == 1 or any(kept.verified for kept in held)
        if step == 50:
            break
    assert [kept.step for kept in held] == [50]

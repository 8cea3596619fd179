"""The interval between saves, against plain minimisation and against a simulation that knows no formula."""

from __future__ import annotations

import math
import random

import pytest

from paceline.checkpoint.interval import (
    LONGEST_SECONDS,
    SaveCost,
    best_interval,
    best_interval_seconds,
    failure_rate,
    goodput,
)
from paceline.cluster.failures import per_device_hour

ASYNCHRONOUS = SaveCost(stall_seconds=0.8, slowdown=0.47, write_seconds=67.0)
BLOCKING = SaveCost(stall_seconds=120.0, slowdown=0.0, write_seconds=120.0)


def simulated(seconds: float, cost: SaveCost, mean_between: float, recovery: float, wall: float, seed: int) -> float:
    """Goodput of a run that saves every `seconds` of training, killed at random times; walks from event to event.

    Durable progress moves only when a save is complete. While one is written, training goes on at a lower rate.
    """
    dice = random.Random(seed)
    clock = durable = 0.0
    while clock < wall:
        end = clock + dice.expovariate(1 / mean_between)
        now, progress, in_flight, slow_until = clock + recovery, durable, None, 0.0
        while now < end:
            target = progress + seconds
            while progress < target and now < end:
                slow = now < slow_until
                rate = 1 - cost.slowdown if slow else 1.0
                reached = now + (target - progress) / rate
                stop = min(end, reached, slow_until if slow else math.inf)
                progress = target if stop == reached else progress + (stop - now) * rate
                now = stop
                if in_flight is not None and now >= slow_until:
                    durable, in_flight = in_flight, None
            if now >= end:
                break
            in_flight, slow_until = progress, now + cost.write_seconds
            now += cost.stall_seconds
            if cost.write_seconds <= cost.stall_seconds and now <= end:
                durable, in_flight = in_flight, None
        clock = end
    return durable / clock


@pytest.mark.parametrize("cost", [ASYNCHRONOUS, BLOCKING])
@pytest.mark.parametrize("mean_between", [3600.0, 7.9 * 3600.0])
def test_r27_the_interval_wins_in_a_simulation_and_its_goodput_is_predicted(
    cost: SaveCost, mean_between: float
) -> None:
    recovery, wall = 180.0, 2000 * mean_between
    best = best_interval_seconds(cost.seconds, 1 / mean_between)
    measured = {}
    for factor in (0.25, 1.0, 4.0):
        seconds = best * factor
        measured[factor] = simulated(seconds, cost, mean_between, recovery, wall, seed=11)
        if seconds >= cost.write_seconds:
            assert measured[factor] == pytest.approx(goodput(seconds, cost, 1 / mean_between, recovery), abs=0.03)
    assert measured[1.0] >= max(measured[0.25], measured[4.0])


@pytest.mark.parametrize("cost_seconds", [1e-3, 0.05, 1.0, 32.0, 600.0, 1e5])
@pytest.mark.parametrize("rate", [1e-8, 1e-5, 1e-3])
def test_no_other_interval_has_a_higher_goodput(cost_seconds: float, rate: float) -> None:
    best = best_interval_seconds(cost_seconds, rate)
    cost = SaveCost(cost_seconds, 0.0, cost_seconds)
    # The condition itself, where differences of goodput drown in rounding.
    assert rate * best == pytest.approx(-math.expm1(-rate * (best + cost_seconds)), rel=1e-9)
    if cost_seconds * rate > 1e-7:
        highest = goodput(best, cost, rate, 60.0)
        assert all(goodput(best * factor, cost, rate, 60.0) < highest for factor in (0.5, 0.9, 1.1, 2.0))


def test_it_is_youngs_where_failures_are_rare_and_dalys_where_they_are_not() -> None:
    assert best_interval_seconds(1.0, 1 / (7.9 * 3600)) == pytest.approx(math.sqrt(2 * 7.9 * 3600), rel=0.01)
    # Daly (2006), the higher-order estimate of the time between two saves: M = 24 h, a save of 5 minutes.
    between, cost = 86400.0, 300.0
    ratio = cost / (2 * between)
    daly = math.sqrt(2 * cost * between) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost
    assert best_interval_seconds(cost, 1 / between) == pytest.approx(daly, rel=1e-3)
    assert best_interval_seconds(0.0, 1e-5) == 0.0


def test_what_a_save_costs_is_the_stall_and_the_slow_down_while_it_is_written() -> None:
    assert ASYNCHRONOUS.seconds == pytest.approx(0.8 + 0.47 * 66.2)
    assert BLOCKING.seconds == 120.0
    assert SaveCost(0.1, -0.2, 5.0).seconds == pytest.approx(0.1)  # a rate that rose by chance is no gain
    assert SaveCost(0.0, 0.0, 0.0).seconds == 0.0


def test_it_is_bounded_by_a_save_in_flight_and_by_people() -> None:
    slow = best_interval(SaveCost(0.01, 0.001, 500.0), 1024)
    assert slow.seconds == 500.0 and slow.best_seconds < 500.0 and "in flight" in slow.explain()
    rare = best_interval(SaveCost(2.0, 0.0, 3.0), 2)
    assert rare.seconds == LONGEST_SECONDS < rare.best_seconds and "people stop runs" in rare.explain()
    # Where even writing takes longer than the bound, there is still only one save in flight.
    assert best_interval(SaveCost(1.0, 0.1, 4000.0), 2).seconds == 4000.0


def test_the_sentence_holds_all_inputs_and_a_setting_of_ones_own_has_its_regret() -> None:
    found = best_interval(ASYNCHRONOUS, 1024, recovery_seconds=90.0)
    assert "31.9 s" in found.explain() and "7h 54m" in found.explain() and "1024 ranks" in found.explain()
    assert "1m 30s" in found.explain() and "47.0%" in found.explain() and "800 ms" in found.explain()
    assert found.regret(found.seconds) == 0.0
    assert found.regret(found.seconds * 8) > found.regret(found.seconds * 2) > 0


def test_failure_rates_are_those_published_and_then_those_of_the_run() -> None:
    assert 1 / failure_rate(1024) == pytest.approx(7.9 * 3600)
    assert 1 / failure_rate(16384) == pytest.approx(54 * 86400 / 419)  # one in 3.1 h
    rates = [failure_rate(ranks) for ranks in (1, 2, 1000, 1024, 4096, 16384, 100_000)]
    assert rates == sorted(rates)
    assert 1 / per_device_hour(16384) == pytest.approx(50_677, rel=1e-3)
    # A run that fails every ten minutes is believed after a few times; one failure proves nothing.
    assert failure_rate(2, failures=12, run_seconds=7200.0) == pytest.approx(1 / 600, rel=0.15)
    assert failure_rate(2, failures=1, run_seconds=60.0) == failure_rate(2) == failure_rate(2, failures=2)

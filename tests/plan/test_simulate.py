"""The simulation against the closed form, within its own standard error; and against what must hold in every run."""

from __future__ import annotations

import time

import msgspec
import pytest

from paceline.checkpoint.interval import SaveCost
from paceline.errors import UsageError
from paceline.plan.failures import Fleet, interval, outlook, published_fleet
from paceline.plan.simulate import DAY, Repair, estimate, simulate

SAVE = SaveCost(stall_seconds=1.0, slowdown=0.05, write_seconds=25.0)
SIGMAS = 4.0
"""A mean of 10 runs is further than this from what it estimates once in 300 times (t distribution); the dice are fixed."""


def fleet_of(devices: int, spares: int = 2, repair: float = DAY, notice: float = 0.0) -> Fleet:
    fleet = published_fleet(devices, 8, spares=spares, repair_seconds=repair)
    return msgspec.structs.replace(fleet, notice_rate=notice)


@pytest.mark.parametrize("repair", ["exponential", "fixed"])
@pytest.mark.parametrize(
    ("fleet", "save", "recovery", "days"),
    [
        (fleet_of(1024), SAVE, 600.0, 700.0),
        (fleet_of(1024, spares=0), SAVE, 600.0, 700.0),
        (fleet_of(1024, spares=9), SaveCost(120.0, 0.0, 120.0), 60.0, 2000.0),
        (fleet_of(16384, spares=6), SAVE, 1200.0, 200.0),
        (fleet_of(2048, spares=2, repair=3600.0, notice=2e-6), SaveCost(20.0, 0.0, 20.0), 300.0, 250.0),
    ],
)
def test_it_agrees_with_the_closed_form(
    fleet: Fleet, save: SaveCost, recovery: float, days: float, repair: Repair
) -> None:
    """Every share, within four standard errors and what the two ends of a run are worth; repairs of any distribution."""
    seconds = max(interval(fleet, save, recovery), save.write_seconds)
    expected = outlook(fleet, save, recovery, seconds)
    found = estimate(
        fleet, save, interval_seconds=seconds, recovery_seconds=recovery, days=days, seed=1, repair=repair
    )  # fmt: skip
    ends = (recovery + seconds) / (days * DAY)
    for name, value in expected.shares().items():
        assert found.shares[name] == pytest.approx(value, abs=SIGMAS * found.errors[name] + ends), name
    assert found.errors["goodput"] < 0.02, "a test that cannot fail is none"


def test_a_wrong_formula_would_be_seen() -> None:
    """The other way round: half the repair time, or a third less recovery, is further off than the tolerance above."""
    fleet = fleet_of(16384, spares=6)
    seconds = interval(fleet, SAVE, 1200.0)
    found = estimate(fleet, SAVE, interval_seconds=seconds, recovery_seconds=1200.0, days=200.0, seed=1)
    ends = (1200.0 + seconds) / (200.0 * DAY)
    wrong = [
        outlook(msgspec.structs.replace(fleet, repair_seconds=DAY / 2), SAVE, 1200.0, seconds),
        outlook(fleet, SAVE, 800.0, seconds),
    ]
    for other in wrong:
        assert abs(other.goodput - found.goodput) > SIGMAS * found.errors["goodput"] + ends


def test_100_000_devices_over_90_days_agree_and_are_played_at_once() -> None:
    """The figure of the issue is seconds; the limit here is one that a busy machine keeps too."""
    fleet = fleet_of(100_000, spares=60)
    seconds = interval(fleet, SAVE, 600.0)
    began = time.perf_counter()
    found = simulate(fleet, SAVE, interval_seconds=seconds, recovery_seconds=600.0, days=90.0, seed=3)
    assert time.perf_counter() - began < 20.0
    assert sum(found.failures.values()) == pytest.approx(fleet.rate * (90 * DAY - found.waiting), rel=0.06)
    assert found.goodput == pytest.approx(outlook(fleet, SAVE, 600.0, seconds).goodput, abs=0.02)


def test_the_ledger_adds_up_and_the_same_seed_is_the_same_run() -> None:
    fleet = fleet_of(4096, spares=1)
    one, two, other = (
        simulate(fleet, SAVE, interval_seconds=400.0, recovery_seconds=300.0, days=60.0, seed=seed)
        for seed in (7, 7, 8)
    )
    assert one == two != other
    spent = one.kept + one.saving + one.redone + one.recovering + one.waiting
    assert spent == pytest.approx(60 * DAY, rel=1e-9)
    assert one.waits > 0 and one.saves > 0 and one.failures["job"] > 0 and one.failures["node"] > 0


@pytest.mark.parametrize("seed", range(5))
def test_more_spares_never_lower_goodput(seed: int) -> None:
    """In means of 10 runs each: a single run is another one once a node waits less."""
    found = [
        estimate(
            fleet_of(8192, spares=spares),
            SAVE,
            interval_seconds=300.0,
            recovery_seconds=600.0,
            days=30.0,
            seed=seed * 10,
        ).goodput
        for spares in (0, 2, 5, 30)
    ]
    assert found == sorted(found)


def test_nothing_fails_and_only_saving_is_lost() -> None:
    fleet = Fleet(devices=8, devices_per_node=8, device_rate=0.0, node_rate=0.0, job_rate=0.0)
    found = simulate(fleet, SAVE, interval_seconds=300.0, recovery_seconds=0.0, days=10.0)
    assert found.goodput == pytest.approx(300 / (300 + SAVE.seconds), rel=1e-3)
    assert found.redone == found.waiting == 0.0


def test_a_node_that_is_never_repaired_ends_the_run() -> None:
    fleet = fleet_of(1024, spares=0, repair=1e12)
    found = simulate(fleet, SAVE, interval_seconds=300.0, recovery_seconds=60.0, days=30.0, seed=1)
    assert found.waits == 1 and found.waiting > 20 * DAY


@pytest.mark.parametrize(("days", "seconds"), [(0.0, 300.0), (1.0, 0.0), (1.0, 10.0)])
def test_nothing_to_play_or_saves_that_overlap_are_refused(days: float, seconds: float) -> None:
    with pytest.raises(UsageError):
        simulate(fleet_of(64), SAVE, interval_seconds=seconds, recovery_seconds=60.0, days=days)

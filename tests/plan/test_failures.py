"""What failures leave of a run's time: against numerical sums, counting, and what was published."""

from __future__ import annotations

import math
import random

import pytest

from paceline.checkpoint.interval import SaveCost, best_interval, failure_rate
from paceline.cluster.failures import Achieved, per_device_hour, range_per_device_hour, share, table
from paceline.errors import UsageError
from paceline.plan.economics import save_cost
from paceline.plan.failures import (
    Fleet,
    cheapest_spares,
    interval,
    outlook,
    published_fleet,
    restart_for,
    spares_for,
    wait_probability,
    waiting_share,
)
from tests.docs.markdown import tables
from tests.pool.pool import ROOT

SAVE = SaveCost(stall_seconds=1.0, slowdown=0.05, write_seconds=25.0)


def test_the_causes_add_up_to_what_was_counted_and_the_rates_are_those_published() -> None:
    llama = next(o for o in table().observed if o.key == "llama3-405b")
    assert sum(c.count for c in table().cause) == llama.failures == 419
    assert llama.hours_between == pytest.approx(3.1, abs=0.02)
    assert share("device") + share("node") + share("job") == pytest.approx(1)
    low, high = range_per_device_hour()
    assert low == pytest.approx(llama.per_device_hour) and high == pytest.approx(1 / (7.9 * 1024))
    # RSC's own projection from its nodes: 1.8 h for 16,384 devices.
    nodes = next(o for o in table().observed if o.key == "rsc-1-nodes")
    assert 1 / (nodes.per_device_hour * 16384) == pytest.approx(1.8, abs=0.01)


@pytest.mark.parametrize("observed", table().observed, ids=lambda o: o.key)
def test_the_model_is_within_the_spread_of_the_sites_that_were_observed(observed: object) -> None:
    """The line goes through two observations; the others, not used for it, lie within a factor of 6 of it."""
    ratio = per_device_hour(observed.devices) / observed.per_device_hour  # type: ignore[attr-defined]
    assert (ratio == pytest.approx(1)) if observed.sized else 1 / 6 < ratio < 6  # type: ignore[attr-defined]


def test_a_published_fleet_fails_as_often_as_the_checkpoint_interval_assumes() -> None:
    for devices in (1, 8, 1000, 16384, 100_000):
        fleet = published_fleet(devices, 8)
        assert fleet.rate == pytest.approx(failure_rate(devices), rel=1e-12)
        assert fleet.nodes == math.ceil(devices / 8)
    assert interval(published_fleet(1024, 8), SAVE) == best_interval(SAVE, 1024, recovery_seconds=600.0).seconds


def test_llama_3_had_over_90_percent_and_the_model_says_what_that_needs() -> None:
    """Published: more than 90% effective. The model gives it with restarts of ten minutes, and not with twenty."""
    fleet = published_fleet(16384, 8, spares=40)
    assert 0.90 < outlook(fleet, SAVE, 600.0).goodput < 0.96
    assert outlook(fleet, SAVE, 1200.0).goodput < 0.90


@pytest.mark.parametrize("achieved", table().achieved, ids=lambda a: a.run)
def test_what_runs_reached_takes_a_restart_that_people_have_and_the_page_says_which(achieved: Achieved) -> None:
    """Published effective times need restarts of 1 to 30 minutes in the model; the derivation's table holds them."""
    fleet = published_fleet(achieved.devices, 8, spares=20)
    save = save_cost(12 * achieved.parameters, achieved.devices, fleet.nodes)
    restart = restart_for(fleet, save, achieved.effective)
    assert restart is not None and 60 < restart < 1800
    assert outlook(fleet, save, restart).goodput == pytest.approx(achieved.effective, abs=1e-9)
    rows = {row[0]: row for found in tables((ROOT / "docs/math/goodput.md").read_text()) for row in found}
    told = rows[achieved.run]
    assert told[2].endswith(f"{achieved.effective:.0%}") and float(told[3].split()[0]) == pytest.approx(
        restart / 60, abs=0.5
    )
    assert restart_for(fleet, save, 0.999) is None


@pytest.mark.parametrize("notice", [False, True])
@pytest.mark.parametrize("rate", [1e-6, 1e-4, 2e-3])
def test_the_shares_add_up_and_are_what_chance_gives(rate: float, notice: bool) -> None:
    """Against lives drawn one by one and cut into save and training by counting."""
    save, recovery, seconds = SaveCost(20.0, 0.0, 20.0), 120.0, 400.0
    fleet = Fleet(devices=1, devices_per_node=1, device_rate=0.0 if notice else rate, node_rate=0.0, job_rate=0.0,
                  notice_rate=rate if notice else 0.0, repair_seconds=0.0)  # fmt: skip
    seen = outlook(fleet, save, recovery, seconds)
    assert math.fsum(seen.shares().values()) == pytest.approx(1, abs=1e-12)
    dice, total, kept, away = random.Random(5), 0.0, 0.0, 0.0
    for _ in range(40_000):
        life = dice.expovariate(rate)
        total += life
        away += min(life, recovery)
        whole, rest = divmod(max(0.0, life - recovery), seconds + save.stall_seconds)
        kept += whole * seconds + (min(rest, seconds) if notice else 0.0)
    assert seen.goodput == pytest.approx(kept / total, abs=0.006)
    assert seen.recovering == pytest.approx(away / total, abs=0.006)


def test_no_failure_leaves_what_saving_leaves() -> None:
    fleet = Fleet(devices=8, devices_per_node=8, device_rate=0.0, node_rate=0.0, job_rate=0.0)
    seen = outlook(fleet, SAVE, 600.0, 100.0)
    assert seen.goodput == pytest.approx(100 / (100 + SAVE.seconds)) and seen.waiting == seen.redone == 0.0
    assert outlook(fleet, SAVE).wall_seconds(1000.0) == pytest.approx(1000.0, rel=0.01)


@pytest.mark.parametrize("notice", [False, True])
def test_the_interval_is_best_to_a_thousandth_of_the_time(notice: bool) -> None:
    """Also where half of the failures are announced, for which the condition of the interval is not exact."""
    fleet = Fleet(devices=64, devices_per_node=8, device_rate=2e-6, node_rate=0.0, job_rate=0.0,
                  notice_rate=1.6e-5 if notice else 0.0, repair_seconds=0.0)  # fmt: skip
    found = outlook(fleet, SAVE, 300.0).goodput
    others = [outlook(fleet, SAVE, 300.0, 25.0 * 1.05**k).goodput for k in range(90)]
    assert found > max(others) - 1e-3


def test_waiting_is_erlangs_formula() -> None:
    """Against the stationary state of the chain that it solves: spares in repair, one more and the job stands still."""
    for away in (0.1, 1.0, 7.5):
        for spares in (0, 1, 3, 12):
            weights = [away**k / math.factorial(k) for k in range(spares + 2)]
            assert waiting_share(spares, away) == pytest.approx(weights[-1] / sum(weights), rel=1e-9)
            assert wait_probability(spares, away) == pytest.approx(weights[-2] / sum(weights[:-1]), rel=1e-9)
    assert waiting_share(0, 0.0) == 0.0


def test_spares_are_the_fewest_that_suffice_and_the_cheapest_are_worth_their_price() -> None:
    for away in (0.05, 2.0, 40.0):
        spares = spares_for(away, 0.95)
        assert 1 - wait_probability(spares, away) >= 0.95 > 1 - wait_probability(spares - 1, away)
    assert spares_for(0.0) == 0 and spares_for(3.0, 0.0) == 0
    fleet = published_fleet(16384, 8)
    best = cheapest_spares(fleet)
    price = {s: (fleet.nodes + s) / (1 - waiting_share(s, fleet.away)) for s in range(200)}
    assert price[best] == min(price.values()) and 1 <= best <= 60
    assert cheapest_spares(published_fleet(8, 8)) == 0, "one node of eight devices is not worth a second one"


def test_more_spares_faster_repair_and_shorter_restarts_never_lower_goodput() -> None:
    def at(spares: int = 4, repair: float = 86400.0, restart: float = 600.0, devices: int = 4096) -> float:
        return outlook(published_fleet(devices, 8, spares=spares, repair_seconds=repair), SAVE, restart).goodput

    for name, values in (("spares", (0, 1, 2, 8, 64)), ("repair", (1e6, 86400.0, 3600.0, 0.0)),
                         ("restart", (3600.0, 600.0, 60.0, 0.0)), ("devices", (65536, 16384, 1024, 8))):  # fmt: skip
        found = [at(**{name: value}) for value in values]  # type: ignore[arg-type]
        assert found == sorted(found), name


def test_bloom_kept_4_spare_nodes_of_52() -> None:
    """48 nodes in use, 1 to 2 failures a week: with repairs of up to a week, 4 spares are what 95% asks for or more."""
    away = 1.5 / (7 * 86400) * 7 * 86400
    assert spares_for(away, 0.95) == 4


@pytest.mark.parametrize(("devices", "each"), [(0, 8), (8, 0), (-1, 1)])
def test_a_fleet_of_nothing_is_refused(devices: int, each: int) -> None:
    with pytest.raises(UsageError, match="1 or more"):
        published_fleet(devices, each)


@pytest.mark.parametrize("probability", [1.0, 1.5, -0.1])
def test_certainty_of_a_spare_node_is_refused(probability: float) -> None:
    with pytest.raises(UsageError, match="below 1"):
        spares_for(3.0, probability)


def test_a_repair_time_beyond_reason_is_refused() -> None:
    with pytest.raises(UsageError, match="spare ones would be needed"):
        spares_for(1e6)

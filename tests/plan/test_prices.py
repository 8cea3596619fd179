"""Prices: the snapshot is dated and sourced, a user's file goes first, and what contradicts itself is refused in words."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.plan.price_file import load_prices
from paceline.plan.prices import KINDS

OWN = """
currency = "{currency}"
[[rent]]
kind = "on-demand"
device = "h100-sxm"
per_device_hour = 2.00
date = 2026-11-01
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "own.toml"
    path.write_text(text)
    return path


def test_every_price_of_the_snapshot_has_a_date_and_a_source() -> None:
    prices = load_prices()
    lines = [*prices.rent, *prices.storage, *prices.egress, *prices.power, *prices.purchase, *prices.colocation]
    assert len(lines) > 50
    for line in lines:
        assert datetime.date(2020, 1, 1) < line.date <= datetime.date(2026, 11, 30)
        assert len(line.source) > 10
    assert {rent.kind for rent in prices.rent} == set(KINDS)


@pytest.mark.parametrize(
    "device", ["a100-sxm-40g", "a100-sxm-80g", "h100-sxm", "h200-sxm", "b200-sxm", "gb200", "mi300x"]
)
def test_the_usual_devices_have_a_price(device: str) -> None:
    offer = load_prices().offer(device)
    assert 0.3 < offer.low <= offer.per_device_hour <= offer.high < 20


def test_reserved_and_spot_are_cheaper_than_on_demand_at_the_same_seller() -> None:
    rents = load_prices().rent
    asked = {(r.provider, r.device): r.per_device_hour or 0 for r in rents if r.kind == "on-demand"}
    pairs = [(r, asked.get((r.provider, r.device))) for r in rents if r.kind != "on-demand"]
    assert sum(price is not None for _, price in pairs) >= 10
    for rent, price in pairs:
        assert price is None or (rent.per_device_hour or 0) < price, rent


def test_a_nodes_own_price_goes_before_that_of_its_device_elsewhere() -> None:
    prices = load_prices()
    assert prices.offer("p5.48xlarge").per_device_hour == pytest.approx(55.04 / 8)
    assert prices.offer("p5.48xlarge").count == 1 and prices.offer("h100-sxm").count > 5
    assert prices.offer("dgx-h100") == prices.offer("h100-sxm"), "nobody rents out that type"


def test_the_users_file_goes_first_and_the_snapshot_fills_in(tmp_path: Path) -> None:
    prices = load_prices(written(tmp_path, OWN.format(currency="USD")))
    assert prices.offer("h100-sxm").per_device_hour == 2.0 and prices.offer("h100-sxm").count == 1
    assert prices.offer("h100-sxm").source == "the user's own"
    assert prices.offer("h200-sxm") == load_prices().offer("h200-sxm") and prices.all_of("storage")


def test_another_currency_is_never_mixed_with_the_snapshots(tmp_path: Path) -> None:
    prices = load_prices(written(tmp_path, OWN.format(currency="EUR")))
    assert prices.currency == "EUR" and not prices.all_of("storage")
    with pytest.raises(UsageError, match="no on-demand price of h200-sxm"):
        prices.offer("h200-sxm")


def test_a_kind_that_nobody_offers_names_those_that_there_are() -> None:
    with pytest.raises(UsageError) as caught:
        load_prices().offer("mi300x", "spot")
    assert "on-demand" in str(caught.value) and "--price" in str(caught.value)
    with pytest.raises(UsageError, match="no on-demand price of v100-sxm-32g"):
        load_prices().offer("v100-sxm-32g")


RENT = '[[rent]]\nkind = "on-demand"\n'
DATE = "date = 2026-11-01\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (RENT + 'device = "h100-sxm"\nper_device_hour = 2\n', "has no date"),
        ("[[storage]]\nkey = 's3'\nper_gb_month = 0.02\n", "has no date"),
        (RENT + DATE + 'node = "p5.48xlarge"\nper_node_hour = 55\nper_device_hour = 55\n', "contradicts itself"),
        (RENT + DATE + 'node = "p5.48xlarge"\ndevice = "h200-sxm"\nper_node_hour = 55\n', "has h100-sxm, not h200-sxm"),
        (RENT + DATE + 'device = "h100-sxm"\nper_node_hour = 55\n', "needs a node"),
        (RENT + DATE + 'device = "h100-sxm"\nper_device_hour = 299\n', "cents"),
        (RENT + DATE + 'device = "h100-sxm"\nper_device_hour = -1\n', "is no price"),
        (RENT + DATE + 'device = "h100-sxm"\n', "has no price"),
        (RENT + DATE + 'device = "h100-sxm"\nper_device_month = 2000\n', "per_device_month"),
        (RENT + DATE + 'device = "h100-smx"\nper_device_hour = 2\n', "h100-sxm"),
        (RENT + DATE + 'node = "p5.48xlrge"\nper_node_hour = 2\n', "p5.48xlarge"),
        (RENT + DATE + "per_device_hour = 2\n", "neither node nor device"),
        (RENT + DATE + 'device = "h100-sxm"\nper_device_hour = "2 USD"\n', "per_device_hour"),
        ('[[rent]]\nkind = "preemptible"\ndevice = "h100-sxm"\nper_device_hour = 2\n' + DATE, "kind"),
        ("[[rents]]\n" + DATE, "[[rent]]"),
        ("[rent]\n" + DATE, "[[rent]]"),
        ('schema = "paceline.prices/9"\n', "paceline.prices/1"),
        ("[[rent\n", "is not TOML"),
        ("currency = 5\n", "currency"),
        ('date = "yesterday"\n' + RENT + 'device = "h100-sxm"\nper_device_hour = 2\n', "date"),
        (RENT + DATE + 'device = "h100-sxm"\nper_device_hour = nan\n', "is no price"),
        (RENT + DATE + 'device = "h100-sxm"\nper_device_hour = true\n', "per_device_hour"),
        ("rent = 5\n", "[[rent]]"),
    ],
)
def test_a_wrong_file_is_refused_in_words(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_prices(written(tmp_path, text))
    assert said in str(caught.value) and "own.toml" in str(caught.value)
    assert caught.value.key == "--prices"


def test_a_date_for_the_whole_file_will_do_and_a_missing_file_is_named(tmp_path: Path) -> None:
    text = "date = 2026-10-01\n" + RENT + 'device = "h100-sxm"\nper_device_hour = 2\n'
    assert load_prices(written(tmp_path, text)).offer("h100-sxm").date == datetime.date(2026, 10, 1)
    with pytest.raises(UsageError, match="cannot read"):
        load_prices(tmp_path / "none.toml")

"""The section of money and goodput that a plan shows."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest

from paceline.cluster.measured import StorageRates
from paceline.errors import UsageError
from paceline.plan.economics import Asked, economics, foresee, save_cost
from paceline.plan.economics_text import describe
from paceline.plan.money import DAY


def of(asked: Asked, devices: int = 2048, days: float = 20.0, size: float = 800e9) -> dict[str, object]:
    return economics(run_seconds=days * DAY, devices=devices, devices_per_node=8, checkpoint_bytes=size, asked=asked)


def test_the_document_holds_its_arithmetic_and_can_be_written() -> None:
    document = of(Asked(what="h100-sxm"))
    text = json.dumps(document)
    assert "NaN" not in text and "Infinity" not in text
    goodput, cost = document["goodput"], document["cost"]
    assert isinstance(goodput, dict) and isinstance(cost, dict)
    shares = [goodput[name] for name in ("goodput", "saving", "redone", "recovering", "waiting")]
    assert math.fsum(shares) == pytest.approx(1)
    assert document["run_seconds"] == pytest.approx(20 * DAY / goodput["goodput"])
    assert cost["total"] == pytest.approx(cost["compute"] + cost["storage"] + cost["egress"])
    shown = describe(document)
    assert cost["price_date"] in shown and "goodput" in shown and "assumed" in shown


def test_a_device_that_nobody_rents_out_has_a_plan_without_a_cost() -> None:
    document = of(Asked(what="v100-sxm-32g"))
    assert document["cost"] is None and "no on-demand price" in str(document["cost_reason"])
    assert "no cost" in describe(document)


def test_spot_is_shown_beside_on_demand() -> None:
    document = of(Asked(what="coreweave-h100", kind="spot"))
    by_kind = document["cost_by_kind"]
    assert isinstance(by_kind, dict) and {"on-demand", "spot"} <= set(by_kind)
    assert by_kind["spot"]["goodput"] < by_kind["on-demand"]["goodput"]


def test_the_simulation_stands_beside_the_closed_form() -> None:
    document = of(Asked(what="h100-sxm", simulate_days=60.0))
    simulated, goodput = document["simulated"], document["goodput"]
    assert isinstance(simulated, dict) and isinstance(goodput, dict)
    error = simulated["errors"]["goodput"]
    assert simulated["shares"]["goodput"] == pytest.approx(goodput["goodput"], abs=4 * error + 0.001)
    assert "simulated 60 days" in describe(document)


def test_what_would_gain_most_comes_first_and_is_worth_what_it_saves() -> None:
    document = of(Asked(what="h100-sxm"), devices=16384)
    gains, goodput, cost = document["gains"], document["goodput"], document["cost"]
    assert isinstance(gains, list) and isinstance(goodput, dict) and isinstance(cost, dict)
    assert [g["gain"] for g in gains] == sorted((g["gain"] for g in gains), reverse=True)
    assert all(g["gain"] >= -1e-9 for g in gains) and gains[0]["change"] == "half as many failures"
    for gain in gains:
        assert gain["money"] == pytest.approx(cost["compute"] * (1 - goodput["goodput"] / gain["goodput"]), abs=1e-3)


def test_renting_stands_beside_buying_where_a_price_is_known() -> None:
    document = of(Asked(what="h100-sxm", utilisation=0.9))
    bought = document["rent_or_buy"]
    assert isinstance(bought, dict) and bought["utilisation"] == 0.9 and bought["months"] > 20
    assert "bought instead" in describe(document)
    assert of(Asked(what="mi300x"))["rent_or_buy"] is None


def test_measured_storage_goes_before_what_is_assumed() -> None:
    storage = StorageRates("2026-11-01", "paceline bench storage", "/x", 8, 5e9, 5e9, 0.0, 0.0, 100.0)
    plain, measured = save_cost(1e12, 64, 8), save_cost(1e12, 64, 8, storage)
    assert measured.write_seconds - measured.stall_seconds == pytest.approx(200.0)
    assert plain.write_seconds - plain.stall_seconds == pytest.approx(1e12 / 8e9)


def test_fewer_spares_than_none_are_refused() -> None:
    with pytest.raises(UsageError, match="0 or more"):
        foresee(64, 8, 1e9, Asked(what="h100-sxm", spares=-1))


def test_it_needs_neither_torch_nor_numpy() -> None:
    """A command that only thinks starts without either."""
    code = (
        "import sys; import paceline.plan.economics, paceline.plan.ownership; "
        "print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "[]"

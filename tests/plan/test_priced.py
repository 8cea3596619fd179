"""A plan's document with money in it: from the command line, and what is refused there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paceline.cli import main
from paceline.cluster.probe import probe_host
from paceline.cluster.spec import parse_cluster
from paceline.plan.economics import Asked
from paceline.plan.priced import premium_text, premiums, price_plan, sold_as

JOB = ["model.preset=llama3.2-1b", "batch.global_batch=256", "data.sequence_length=2048", "--fixed"]
LONG = [*JOB, "run.tokens=2e12"]
HERE = probe_host()


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main(["plan", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_plan_holds_its_cost_with_the_date_of_the_price(capsys: pytest.CaptureFixture[str]) -> None:
    code, document = planned(capsys, *LONG, "--cluster", "8xp5.48xlarge")
    chosen, cost = document["chosen"], document["chosen"]["cost"]
    assert code == 0 and cost["currency"] == "USD" and cost["price_date"] == "2026-11-09"
    found = document["economics"]
    assert found["run_seconds"] == pytest.approx(chosen["run_seconds"] / found["goodput"]["goodput"])
    assert cost["total"] == pytest.approx(
        cost["devices"] * found["run_seconds"] / 3600 * 6.88 + cost["storage"], rel=1e-6
    )
    assert cost["devices"] == 64 + 8 * found["goodput"]["spare_nodes"]


def test_options_change_what_they_say(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text('[[rent]]\nkind = "reserved"\ndevice = "h100-sxm"\nper_device_hour = 1.0\ndate = 2026-11-20\n')
    cluster = ("--cluster", "8x8xh100-sxm:ndr400")
    plain = planned(capsys, *LONG, *cluster)[1]
    mine = planned(capsys, *LONG, *cluster, "--prices", str(own), "--price", "reserved")[1]
    assert mine["chosen"]["cost"]["per_device_hour"] == 1.0 < plain["chosen"]["cost"]["per_device_hour"]
    spares = planned(capsys, *LONG, *cluster, "--spares", "5", "--repair", "2h", "--restart", "20m")[1]["economics"]
    assert spares["goodput"]["spare_nodes"] == 5 and spares["goodput"]["recovery_seconds"] == 1200.0
    assert "2h 00m" in " ".join(spares["assumptions"])
    played = planned(capsys, *LONG, *cluster, "--simulate", "40")[1]["economics"]["simulated"]
    assert played["days"] == 40.0 and played["errors"]["goodput"] > 0


def test_the_text_has_a_section_of_money_within_100_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *LONG, "--cluster", "8xp5.48xlarge", "--price", "reserved"]) == 0
    text = capsys.readouterr().out
    section = text[text.index("goodput ") :]
    assert "device-hours x" in section and "AWS" in section and "assumed" in section
    assert all(len(line) <= 100 for line in section.splitlines())


def test_a_device_without_a_price_has_a_plan_and_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    code, document = planned(capsys, *LONG, "--cluster", "1x8xmi355x")
    assert code == 0 and document["chosen"]["cost"] is None
    assert "no on-demand price of mi355x" in document["economics"]["cost_reason"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--price", "spot", "--cluster", "1x8xmi300x"], "no spot price of mi300x"),
        (["--prices", "none.toml", "--cluster", "1x8xmi300x"], "cannot read none.toml"),
        (["--spares", "-1", "--cluster", "1x8xh100-sxm"], "0 or more"),
        (["--simulate", "0", "--cluster", "1x8xh100-sxm"], "above 0"),
        (["--repair", "soon", "--cluster", "1x8xh100-sxm"], "'soon' is not a duration"),
        (["--price", "cheap", "--cluster", "1x8xh100-sxm"], "invalid choice"),
        (["--cluster", "4xp5.48xlrge"], "p5.48xlarge"),
    ],
)
def test_what_is_wrong_is_a_usage_error_in_words(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    code, document = planned(capsys, *LONG, *words)
    assert code == 2 and said in document["error"]["message"] + str(document["error"]["next"])


def test_the_node_type_is_paid_for_else_the_device() -> None:
    assert sold_as(parse_cluster("2xp5.48xlarge", HERE)) == "p5.48xlarge"
    assert sold_as(parse_cluster("2x8xh100-sxm", HERE)) == "h100-sxm"
    seen = msgspec.structs.replace(HERE, device_name="NVIDIA H100 80GB HBM3", device_kind="cuda")
    assert sold_as(msgspec.structs.replace(parse_cluster("here", HERE), host=seen, device=None)) == "h100-sxm"


def test_other_layouts_cost_in_proportion_and_an_unknown_length_costs_nothing_known() -> None:
    def layout(seconds: float) -> dict[str, Any]:
        return {"run_seconds": seconds * 100, "step_seconds": seconds, "checkpoint_bytes": 1e9, "cost": None}

    document = {"chosen": layout(1e4), "alternatives": [layout(2e4)], "front": [{"step_seconds": 1.5e4, "cost": None}]}
    cluster = parse_cluster("2x8xh100-sxm", HERE)
    price_plan(document, cluster, Asked(what="h100-sxm"))
    first, second = document["chosen"]["cost"]["total"], document["alternatives"][0]["cost"]["total"]  # type: ignore[call-overload,index]
    assert second == pytest.approx(2 * first) and document["front"][0]["cost"] == pytest.approx(1.5 * first)  # type: ignore[index]
    unknown: dict[str, Any] = {"chosen": {**layout(1.0), "run_seconds": None}, "alternatives": []}
    price_plan(unknown, cluster, Asked(what="h100-sxm"))
    assert "run.steps" in unknown["economics"]["cost_reason"]
    nothing: dict[str, Any] = {"chosen": None, "alternatives": []}
    price_plan(nothing, cluster, Asked(what="h100-sxm"))
    assert nothing["economics"]["cost_reason"] == "no layout fits"


def test_a_faster_network_is_worth_what_it_saves() -> None:
    clusters = [
        parse_cluster(f"4x8x{what}", HERE) for what in ("a100-sxm-80g:eth100", "a100-sxm-80g:hdr200", "h100-sxm")
    ]
    cost = {"per_device_hour": 1.4, "currency": "USD"}
    rows = [{"run_seconds": seconds, "cost": cost} for seconds in (7 * 86400.0, 5 * 86400.0, 1 * 86400.0)]
    (found,) = premiums(rows, clusters)
    assert (found["slow"], found["fast"]) == (clusters[0].text, clusters[1].text)
    assert found["days_saved"] == pytest.approx(2.0) and found["worth"] == pytest.approx(1.4 * 0.4)
    assert "2.00 of 7.00 days" in premium_text(found)
    assert premiums([{**row, "cost": None} for row in rows], clusters) == []

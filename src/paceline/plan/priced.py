"""A plan's document with goodput and money: of the chosen layout in full, of the others their cost. No torch."""

from __future__ import annotations

import itertools
from typing import Any

from paceline.cluster.catalogue import catalogue_key
from paceline.cluster.spec import Cluster
from paceline.plan.economics import KEPT, Asked, economics, foresee, money_of
from paceline.plan.money import interconnect_premium
from paceline.plan.price_file import load_prices
from paceline.plan.prices import Prices

UNKNOWN_LENGTH = "how long the run is, is not known: give run.steps or run.tokens"
NO_LAYOUT = "no layout fits"


def sold_as(cluster: Cluster) -> str:
    """What is paid for: the node type, else the device's key, else the name that a device gives itself."""
    if cluster.node is not None:
        return cluster.node
    if cluster.device is not None:
        return cluster.device.key
    return catalogue_key(cluster.host.device_name) or cluster.host.device_kind


def price_plan(document: dict[str, Any], cluster: Cluster, asked: Asked, prices: Prices | None = None) -> None:
    """Fill `economics` and each layout's `cost` in a plan's document.

    A layout's `cost` is `plan.money.Money` as a record, or null. `economics` is the document of `plan.economics`, or holds
    nothing but a reason under `cost_reason`.

    Args:
        document: with `chosen` and `alternatives`, each with `run_seconds` and `checkpoint_bytes`.
        cluster: that the plan is for.
        asked: what is paid for and how.
        prices: `load_prices()` unless given.
    """
    chosen = document.get("chosen")
    if not chosen or chosen.get("run_seconds") is None:
        document["economics"] = {"cost": None, "cost_reason": UNKNOWN_LENGTH if chosen else NO_LAYOUT}
        return
    known, storage = prices or load_prices(), cluster.measured.storage if cluster.measured is not None else None
    size = chosen["checkpoint_bytes"]
    found = document["economics"] = economics(
        run_seconds=chosen["run_seconds"], devices=cluster.devices, devices_per_node=cluster.devices_per_node,
        checkpoint_bytes=size, asked=asked, prices=known, storage=storage,
    )  # fmt: skip
    chosen["cost"] = found["cost"]
    # Failures do not depend on the layout: one outlook for all.
    seen = foresee(cluster.devices, cluster.devices_per_node, size, asked, storage)
    for other in document.get("alternatives", ()):
        money, _ = money_of(other["run_seconds"], cluster.devices, asked, known, seen, KEPT * size)
        other["cost"] = None if money is None else money.to_record()
    for point in document.get("front", ()):
        point["cost"] = _scaled(found["cost"], chosen, point)


def premiums(rows: list[dict[str, Any]], clusters: list[Cluster]) -> list[dict[str, Any]]:
    """What a faster network is worth, for each two clusters that differ in nothing else.

    Args:
        rows: of the clusters, each with its text, `run_seconds` and `cost`.
        clusters: in the same order.
    """
    found = []
    for slow, fast in itertools.permutations(range(len(rows)), 2):
        one, two = clusters[slow], clusters[fast]
        alike = (one.nodes, one.devices_per_node, one.device) == (two.nodes, two.devices_per_node, two.device)
        slower, faster = rows[slow].get("run_seconds") or 0.0, rows[fast].get("run_seconds") or 0.0
        cost = rows[slow].get("cost")
        if not alike or cost is None or not 0 < faster < slower:
            continue
        worth = interconnect_premium(slower, faster, one.devices, cost["per_device_hour"], 0.0, cost["currency"])
        found.append({"slow": one.text, "fast": two.text, **worth.to_record()})
    return found


def premium_text(premium: dict[str, Any]) -> str:
    """One such comparison in a sentence."""
    return (
        f"the network of {premium['fast']} saves {premium['days_saved']:.2f} of {premium['days']:.2f} days against "
        f"{premium['slow']}, and costs no more up to {premium['worth']:.2f} {premium['currency']} a device and hour on top"
    )


def _scaled(cost: dict[str, Any] | None, chosen: dict[str, Any] | None, point: dict[str, Any]) -> float | None:
    """The cost of a layout on the same devices, in proportion to its step."""
    if cost is None or not chosen or not chosen.get("step_seconds"):
        return None
    return float(cost["total"]) * float(point["step_seconds"]) / float(chosen["step_seconds"])

"""A plan's document with goodput and money: of the chosen layout in full, of the others their cost. No torch."""

from __future__ import annotations

from typing import Any

import msgspec

from paceline.cluster.catalogue import catalogue_key
from paceline.cluster.measured import StorageRates
from paceline.cluster.spec import Cluster
from paceline.plan.economics import Asked, economics
from paceline.plan.prices import Prices

UNKNOWN_LENGTH = "how long the run is, is not known: give run.steps or run.tokens"


def sold_as(cluster: Cluster) -> str:
    """What is paid for: the node type, else the device's key, else the name that a device gives itself."""
    if cluster.node is not None:
        return cluster.node
    if cluster.device is not None:
        return cluster.device.key
    return catalogue_key(cluster.host.device_name) or cluster.host.device_kind


def price_plan(
    document: dict[str, Any], cluster: Cluster, asked: Asked, prices: Prices | None = None, devices: int | None = None
) -> None:
    """Fill `economics` and each layout's `cost` in a plan's document.

    A layout's `cost` is `plan.money.Money` as a record, or null. `economics` is the document of `plan.economics`, or holds
    nothing but a reason under `cost_reason`.

    Args:
        document: with `chosen` and `alternatives`, each with `run_seconds` and `checkpoint_bytes`.
        cluster: that the plan is for.
        asked: what is paid for and how.
        prices: `load_prices()` unless given.
        devices: that the run has, where not all of the cluster.
    """
    layouts = [entry for entry in (document.get("chosen"), *document.get("alternatives", ())) if entry]
    storage = cluster.measured.storage if cluster.measured is not None else None
    found: dict[str, Any] = {"cost": None, "cost_reason": UNKNOWN_LENGTH}
    for number, entry in enumerate(layouts):
        told = _of(entry, cluster, asked if number == 0 else _quiet(asked), prices, devices, storage)
        entry["cost"] = told["cost"] if told is not None else None
        if number == 0 and told is not None:
            found = told
    document["economics"] = found
    for point in document.get("front", ()):
        point["cost"] = _scaled(found["cost"], document.get("chosen"), point)


def _of(
    entry: dict[str, Any], cluster: Cluster, asked: Asked, prices: Prices | None, devices: int | None,
    storage: StorageRates | None,
) -> dict[str, Any] | None:  # fmt: skip
    if entry.get("run_seconds") is None:
        return None
    return economics(
        run_seconds=entry["run_seconds"], devices=devices or cluster.devices, devices_per_node=cluster.devices_per_node,
        checkpoint_bytes=entry["checkpoint_bytes"], asked=asked, prices=prices, storage=storage,
    )  # fmt: skip


def _quiet(asked: Asked) -> Asked:
    """The same without a simulation: failures do not depend on the layout."""
    return msgspec.structs.replace(asked, simulate_days=None)


def _scaled(cost: dict[str, Any] | None, chosen: dict[str, Any] | None, point: dict[str, Any]) -> float | None:
    """The cost of a layout on the same devices, in proportion to its step."""
    if cost is None or not chosen or not chosen.get("step_seconds"):
        return None
    return float(cost["total"]) * float(point["step_seconds"]) / float(chosen["step_seconds"])

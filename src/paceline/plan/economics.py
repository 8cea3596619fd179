"""Goodput and money of a planned run, as a document; `economics_text.py` writes it. No torch.

What is not measured of saving and restarting is assumed; each assumption is said with its number.
"""

from __future__ import annotations

from typing import Any

import msgspec

from paceline.checkpoint.interval import SaveCost
from paceline.cluster.measured import StorageRates
from paceline.errors import UsageError
from paceline.plan.failures import (
    NOT_TO_WAIT,
    REPAIR_SECONDS,
    RESTART_SECONDS,
    Fleet,
    Outlook,
    cheapest_spares,
    outlook,
    published_fleet,
    spares_for,
)
from paceline.plan.money import HOURS_PER_MONTH, Money, cost_of
from paceline.plan.ownership import rent_or_buy
from paceline.plan.price_file import load_prices
from paceline.plan.prices import KINDS, Kind, Prices
from paceline.plan.simulate import estimate
from paceline.units import format_bandwidth, format_percent, format_seconds

COPY_BYTES_PER_SECOND = 10e9
"""From one device into the memory of its host; all devices copy their shares at once."""

WRITE_BYTES_PER_SECOND = 1e9
"""Of one node into storage that all nodes share, up to `STORAGE_BYTES_PER_SECOND` of all."""

STORAGE_BYTES_PER_SECOND = 200e9

SLOWDOWN = 0.05
"""Share of the rate of steps that is lost while a checkpoint is written beside them."""

KEPT = 3
"""Checkpoints that are kept."""

SPOT_PER_MONTH = 0.2
"""Interruptions of a spot node a month: the edge of the highest class of the AWS Spot Instance Advisor, over 20%."""

SPOT_NOTICE_SECONDS = 30.0
"""Notice before a spot node is taken: 30 s at Google and Azure, 120 s at AWS. A save that needs longer is not made."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a user may say about money and failures.

    what: key of a device or of a node type. spares: nodes that stand by; None takes the cheapest number.
    rate_factor: of failures against published ones. simulate_days: play that many days beside the closed form.
    utilisation: share of the hours in which a node of one's own would be used.
    """

    what: str
    kind: Kind = "on-demand"
    spares: int | None = None
    restart_seconds: float = RESTART_SECONDS
    repair_seconds: float = REPAIR_SECONDS
    rate_factor: float = 1.0
    interruptions_per_month: float = SPOT_PER_MONTH
    notice_seconds: float = SPOT_NOTICE_SECONDS
    simulate_days: float | None = None
    seed: int = 0
    utilisation: float = 1.0


def save_cost(checkpoint_bytes: float, devices: int, nodes: int, storage: StorageRates | None = None) -> SaveCost:
    """What a save costs: each device copies its share, then the nodes write while training goes on."""
    stall = checkpoint_bytes / devices / COPY_BYTES_PER_SECOND
    rate = storage.write_bytes_per_second if storage is not None else min(
        nodes * WRITE_BYTES_PER_SECOND, STORAGE_BYTES_PER_SECOND
    )  # fmt: skip
    return SaveCost(stall, SLOWDOWN, stall + checkpoint_bytes / rate)


def foresee(
    devices: int, devices_per_node: int, checkpoint_bytes: float, asked: Asked, storage: StorageRates | None = None
) -> Outlook:
    """What failures leave of a run's time, at the best interval, with the spares that were asked for.

    Raises:
        UsageError: there is no device, or fewer spares than none.
    """
    if asked.spares is not None and asked.spares < 0:
        raise UsageError(f"{asked.spares} spare nodes: 0 or more", key="--spares", values={"spares": asked.spares})
    nodes = -(-devices // max(1, devices_per_node))
    save = save_cost(checkpoint_bytes, max(1, devices), max(1, nodes), storage)
    spot = asked.kind == "spot"
    fleet = published_fleet(
        devices, devices_per_node, repair_seconds=asked.repair_seconds, rate_factor=asked.rate_factor,
        interruptions_per_node_hour=asked.interruptions_per_month / HOURS_PER_MONTH if spot else 0.0,
        notice=save.write_seconds <= asked.notice_seconds,
    )  # fmt: skip
    spares = cheapest_spares(fleet) if asked.spares is None else asked.spares
    return outlook(msgspec.structs.replace(fleet, spares=spares), save, asked.restart_seconds)


def economics(
    *,
    run_seconds: float,
    devices: int,
    devices_per_node: int,
    checkpoint_bytes: float,
    asked: Asked,
    prices: Prices | None = None,
    data_bytes: float = 0.0,
    storage: StorageRates | None = None,
) -> dict[str, Any]:
    """`goodput`, `run_seconds` with failures, `cost` (null with its reason where no price is known) and what was assumed.

    Args:
        run_seconds: of the run without saves and failures.
        devices: of the run, without spares.
        devices_per_node: that fail together.
        checkpoint_bytes: of one checkpoint.
        asked: what is paid for and how.
        prices: `load_prices()` unless given.
        data_bytes: of the data set, stored beside the checkpoints.
        storage: as measured, where it was.

    Raises:
        UsageError: a number is out of range.
    """
    seen = foresee(devices, devices_per_node, checkpoint_bytes, asked, storage)
    known, stored = prices or load_prices(), KEPT * checkpoint_bytes + data_bytes
    money, reason = money_of(run_seconds, devices, asked, known, seen, stored)
    bought = rent_or_buy(asked.what, known, asked.kind, asked.utilisation) if money is not None else None
    document: dict[str, Any] = {
        "goodput": {
            **seen.to_record(),
            "spare_nodes_for_95_percent": spares_for(seen.fleet.away, NOT_TO_WAIT),
            "undisturbed_probability": seen.undisturbed(run_seconds),
        },
        "run_seconds": seen.wall_seconds(run_seconds),
        "cost": None if money is None else money.to_record(),
        "cost_reason": reason,
        "cost_by_kind": _by_kind(
            run_seconds, devices, devices_per_node, checkpoint_bytes, asked, known, storage, stored
        ),
        "derivation": [
            *seen.derivation(),
            f"the mean of all such runs; {format_percent(seen.undisturbed(run_seconds))} of them see no failure",
            *(money.derivation if money is not None else ()),
        ],
        "gains": gains(seen, money),
        "rent_or_buy": None if bought is None else bought.to_record(),
        "assumptions": assumptions(asked, seen, storage),
    }
    if asked.simulate_days is not None:
        played = estimate(
            seen.fleet, seen.save, interval_seconds=seen.interval_seconds, recovery_seconds=seen.recovery_seconds,
            days=asked.simulate_days, seed=asked.seed,
        )  # fmt: skip
        document["simulated"] = played.to_record()
        document["derivation"].append(played.describe())
    return document


def money_of(
    run_seconds: float, devices: int, asked: Asked, prices: Prices, seen: Outlook, stored_bytes: float
) -> tuple[Money | None, str | None]:
    """The cost, or why there is none: a device that nobody rents out has a plan all the same."""
    try:
        prices.offer(asked.what, asked.kind)
    except UsageError as error:
        return None, error.message
    money = cost_of(
        run_seconds, devices, asked.what, prices, kind=asked.kind, outlook=seen, stored_bytes=stored_bytes
    )  # fmt: skip
    return money, None


def _by_kind(
    run_seconds: float, devices: int, devices_per_node: int, checkpoint_bytes: float, asked: Asked, prices: Prices,
    storage: StorageRates | None, stored_bytes: float,
) -> dict[str, dict[str, float]]:  # fmt: skip
    """The same run at every kind of price that is known: spot is cheap an hour and pays in goodput."""
    found: dict[str, dict[str, float]] = {}
    for kind in KINDS:
        other = msgspec.structs.replace(asked, kind=kind)
        seen = foresee(devices, devices_per_node, checkpoint_bytes, other, storage)
        money, _ = money_of(run_seconds, devices, other, prices, seen, stored_bytes)
        if money is not None:
            found[kind] = {"total": money.total, "goodput": seen.goodput, "run_seconds": money.wall_seconds}
    return found


def gains(seen: Outlook, money: Money | None) -> list[dict[str, Any]]:
    """What halving each thing that costs time would gain, the largest first: share of the time, and money."""
    fleet, save = seen.fleet, seen.save
    half = SaveCost(save.stall_seconds / 2, save.slowdown / 2, save.write_seconds)
    changes = {
        "restarts twice as fast": outlook(fleet, save, seen.recovery_seconds / 2),
        "saves at half their cost": outlook(fleet, half, seen.recovery_seconds),
        "half as many failures": outlook(
            msgspec.structs.replace(
                fleet, device_rate=fleet.device_rate / 2, node_rate=fleet.node_rate / 2, job_rate=fleet.job_rate / 2
            ),
            save, seen.recovery_seconds,
        ),
        "repairs twice as fast": outlook(
            msgspec.structs.replace(fleet, repair_seconds=fleet.repair_seconds / 2), save, seen.recovery_seconds
        ),
    }  # fmt: skip
    found = [
        {
            "change": change,
            "goodput": better.goodput,
            "gain": better.goodput - seen.goodput,
            "money": None if money is None else money.compute * (1 - seen.goodput / better.goodput),
        }
        for change, better in changes.items()
        if seen.goodput > 0
    ]
    return sorted(found, key=lambda gain: -float(gain["gain"] or 0.0))


def assumptions(asked: Asked, seen: Outlook, storage: StorageRates | None) -> list[str]:
    """What is not measured, with its numbers."""
    fleet: Fleet = seen.fleet
    wrote = (
        f"a checkpoint is written at {format_bandwidth(storage.write_bytes_per_second)}, as measured {storage.date}"
        if storage is not None
        else f"a node writes a checkpoint at {format_bandwidth(WRITE_BYTES_PER_SECOND)}, all of them at up to "
        f"{format_bandwidth(STORAGE_BYTES_PER_SECOND)}"
    )
    lines = [
        f"a device's share of a checkpoint is copied at {format_bandwidth(COPY_BYTES_PER_SECOND)}; {wrote}, which slows "
        f"steps by {format_percent(SLOWDOWN)} meanwhile",
        f"from a failure until training goes on: {format_seconds(asked.restart_seconds)}; a failed node is back, or another "
        f"in its place, after {format_seconds(asked.repair_seconds)}",
        "failures strike at random, at rates that were published of accelerators in data centres",
    ]
    if asked.kind == "spot":
        told = "a last save is made" if fleet.notice_rate else "too little for a last save"
        lines.append(
            f"a spot node is taken away {asked.interruptions_per_month:g} times a month with "
            f"{format_seconds(asked.notice_seconds)} of notice, {told}"
        )
    return lines

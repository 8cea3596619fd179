"""Rent or buy: the month in which an owned node has cost as much as a rented one. No torch.

Every assumption is a field, so that the answer says what it rests on and what moves it: docs/math/goodput.md.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from paceline.cluster.nodes import find_node, node_type
from paceline.errors import UsageError
from paceline.plan.money import HOURS_PER_MONTH
from paceline.plan.prices import Kind, Prices
from paceline.units import format_money, format_percent

SWING = 0.2
"""By how much each input is moved to show what it moves."""


class Ownership(msgspec.Struct, frozen=True, kw_only=True):
    """Owning one node, in currency units and months. Those with a default are assumptions.

    price: of the node, new. beside: network, cables, racks and installation as a share of it. watts: of the node at most;
    load: the share of it drawn on average; pue: watts of the building per watt of the node, cooling included.
    colocation_per_kw_month: of `watts`, since that is what is reserved. staff_per_month: of people, for this node's share.
    maintenance_per_year: repairs and contract as a share of the price. utilisation: share of the hours in which it does
    what would else be rented. lifetime_months: after which it is replaced. residual: share of the price that it is sold for
    at the end. rent_falls_per_year: of the rent that it replaces.
    """

    price: float
    devices: int
    watts: float
    per_kwh: float
    colocation_per_kw_month: float
    beside: float = 0.15
    load: float = 0.8
    pue: float = 1.3
    staff_per_month: float = 500.0
    maintenance_per_year: float = 0.05
    utilisation: float = 1.0
    lifetime_months: float = 48.0
    residual: float = 0.0
    rent_falls_per_year: float = 0.0

    def __post_init__(self) -> None:
        for name in ("price", "devices", "watts", "lifetime_months"):
            if getattr(self, name) <= 0:
                raise UsageError(f"{name} = {getattr(self, name):g} of a node that is bought: it must be above 0")
        for name in ("load", "utilisation"):
            if not 0 < getattr(self, name) <= 1:
                raise UsageError(f"{name} = {getattr(self, name):g} of a node that is bought: a share in 0 to 1")
        if self.pue < 1:
            raise UsageError(f"pue = {self.pue:g}: a building draws at least what its nodes draw, 1 or more")

    @property
    def capital(self) -> float:
        """Paid at the start, less what is got back at the end."""
        return self.price * (1 + self.beside - self.residual)

    def monthly(self) -> dict[str, float]:
        """Paid each month, by what for."""
        kw = self.watts / 1000
        return {
            "power and cooling": kw * self.load * self.pue * HOURS_PER_MONTH * self.per_kwh,
            "colocation": kw * self.colocation_per_kw_month,
            "staff": self.staff_per_month,
            "maintenance": self.price * self.maintenance_per_year / 12,
        }

    @property
    def running(self) -> float:
        return math.fsum(self.monthly().values())

    def rent(self, per_device_hour: float) -> float:
        """What the hours in which it is used would cost to rent, in the first month."""
        return self.devices * HOURS_PER_MONTH * self.utilisation * per_device_hour

    @property
    def per_used_hour(self) -> float:
        """Of a device, over the lifetime."""
        hours = self.devices * HOURS_PER_MONTH * self.utilisation * self.lifetime_months
        return (self.capital + self.running * self.lifetime_months) / hours


class BreakEven(msgspec.Struct, frozen=True, kw_only=True):
    """The month from which buying is cheaper; None where that is not within the lifetime."""

    months: float | None
    utilisation: float
    per_device_hour: float
    owned_per_device_hour: float
    currency: str
    derivation: tuple[str, ...]
    moved_by: tuple[tuple[str, float | None], ...]

    def to_record(self) -> dict[str, Any]:
        return {
            **msgspec.to_builtins(self),
            "moved_by": [{"change": change, "months": months} for change, months in self.moved_by],
        }


def owning(node: str, prices: Prices) -> Ownership:
    """One node of a type, at the prices that are known, with the assumptions of `Ownership`.

    Raises:
        UsageError: the type, its price, or what it draws is not known.
    """
    sold, bought = node_type(node), prices.bought(node)
    if bought is None or sold.watts is None:
        raise UsageError(
            f"no {'purchase price' if bought is None else 'power'} of {node} is known",
            key="--prices",
            values={"node": node},
            hint="Give one with --prices FILE: [[purchase]] with node, per_node, date."
            if bought is None
            else "Take a type that states it, such as dgx-h100.",
        )
    power, place = prices.all_of("power"), prices.all_of("colocation")
    return Ownership(
        price=bought.per_node, devices=sold.devices, watts=sold.watts,
        per_kwh=power[0].per_kwh if power else 0.0, colocation_per_kw_month=place[0].per_kw_month if place else 0.0,
    )  # fmt: skip


def break_even(owned: Ownership, per_device_hour: float, currency: str = "USD") -> BreakEven:
    """The month in which a node that is bought has cost what renting its used hours has."""
    months = _months(owned, per_device_hour)
    rent = owned.rent(per_device_hour)
    parts = " + ".join(f"{name} {amount:,.0f}" for name, amount in owned.monthly().items())
    lines = [
        f"to buy: {format_money(owned.price, currency)} x (1 + {owned.beside:g} beside it - {owned.residual:g} got back) = "
        f"{format_money(owned.capital, currency)}",
        f"to own, a month: {parts} = {format_money(owned.running, currency)}",
        f"to rent, a month: {owned.devices} devices x {HOURS_PER_MONTH:g} h x {format_percent(owned.utilisation)} used x "
        f"{per_device_hour:.2f} = {format_money(rent, currency)}",
        _verdict(owned, rent, months, currency),
        f"over {owned.lifetime_months:g} months a used device-hour of one's own costs {owned.per_used_hour:.2f} {currency}",
    ]
    return BreakEven(
        months=months,
        utilisation=owned.utilisation,
        per_device_hour=per_device_hour,
        owned_per_device_hour=owned.per_used_hour,
        currency=currency,
        derivation=tuple(lines),
        moved_by=tuple(_moved(owned, per_device_hour)),
    )


def rent_for(owned: Ownership, months: float) -> float:
    """The rent per device and hour at which buying breaks even in that month, where rents stay as they are."""
    used = owned.devices * HOURS_PER_MONTH * owned.utilisation
    return (owned.capital / months + owned.running) / used


def _verdict(owned: Ownership, rent: float, months: float | None, currency: str) -> str:
    margin = rent - owned.running
    if margin <= 0:
        return f"never: owning costs {format_money(-margin, currency)} more a month before the purchase is paid for"
    plain = owned.capital / margin
    falls = f" (rents falling {format_percent(owned.rent_falls_per_year)} a year)" if owned.rent_falls_per_year else ""
    if months is None:
        return f"not within {owned.lifetime_months:g} months{falls}: {owned.capital:,.0f} / {margin:,.0f} = {plain:.1f}"
    return f"break-even after {owned.capital:,.0f} / ({rent:,.0f} - {owned.running:,.0f}) = {months:.1f} months{falls}"


def _months(owned: Ownership, per_device_hour: float) -> float | None:
    """Month by month, since rents may fall; the last one in proportion."""
    rent, falls = owned.rent(per_device_hour), (1 - owned.rent_falls_per_year) ** (1 / 12)
    left = owned.capital
    for month in range(math.ceil(owned.lifetime_months)):
        gained = rent * falls**month - owned.running
        if gained <= 0:
            return None
        if left <= gained:
            found = month + left / gained
            return found if found <= owned.lifetime_months else None
        left -= gained
    return None


def _moved(owned: Ownership, per_device_hour: float) -> list[tuple[str, float | None]]:
    """The break-even with one input changed at a time."""
    change = msgspec.structs.replace
    up, down = 1 + SWING, 1 - SWING
    return [
        (f"rent {SWING:+.0%}", _months(owned, per_device_hour * up)),
        (f"rent {-SWING:+.0%}", _months(owned, per_device_hour * down)),
        ("used half of the time", _months(change(owned, utilisation=owned.utilisation / 2), per_device_hour)),
        (f"price {SWING:+.0%}", _months(change(owned, price=owned.price * up), per_device_hour)),
        (f"price {-SWING:+.0%}", _months(change(owned, price=owned.price * down), per_device_hour)),
        ("electricity twice as dear", _months(change(owned, per_kwh=owned.per_kwh * 2), per_device_hour)),
        ("staff twice as dear", _months(change(owned, staff_per_month=owned.staff_per_month * 2), per_device_hour)),
        ("rents falling 20% a year", _months(change(owned, rent_falls_per_year=0.2), per_device_hour)),
        ("sold for 30% at the end", _months(change(owned, residual=0.3), per_device_hour)),
    ]


def rent_or_buy(what: str, prices: Prices, kind: Kind = "on-demand", utilisation: float = 1.0) -> BreakEven | None:
    """Buying a node with the device of `what` (a device's or a node type's key) against renting it at a kind of price.

    None where no purchase price, no draw or no rent of such a node is known.
    """
    node = _for_sale(what, prices)
    if node is None:
        return None
    try:
        offer = prices.offer(what, kind)
    except UsageError:
        return None
    owned = msgspec.structs.replace(owning(node, prices), utilisation=utilisation)
    return break_even(owned, offer.per_device_hour, prices.currency)


def _for_sale(what: str, prices: Prices) -> str | None:
    """A node type of the same device whose price and draw are known: itself, or the first other one."""
    sold = find_node(what)
    device = sold.device if sold is not None else what
    nodes = [node_type(purchase.node) for purchase in prices.all_of("purchase")]
    fitting = [node.key for node in nodes if node.device == device and node.watts is not None]
    return what if what in fitting else next(iter(fitting), None)

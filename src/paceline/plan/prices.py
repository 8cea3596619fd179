"""Prices with their dates, and the offer that follows from them; `price_file.py` reads them. No torch."""

from __future__ import annotations

import datetime
from typing import Any, Literal, get_args

import msgspec

from paceline.cluster.nodes import find_node
from paceline.errors import UsageError

Kind = Literal["on-demand", "reserved", "spot"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Line(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every price carries."""

    date: datetime.date
    source: str = "the user's own"


class Rent(Line, frozen=True, kw_only=True):
    """A device or a node for an hour; `per_device_hour` is set whichever of the two was given."""

    kind: Kind
    provider: str = "own"
    node: str | None = None
    device: str | None = None
    per_node_hour: float | None = None
    per_device_hour: float | None = None
    term_months: float | None = None
    region: str | None = None


class Storage(Line, frozen=True, kw_only=True):
    """Bytes kept for a month; GB is 10^9 bytes."""

    key: str
    per_gb_month: float


class Egress(Line, frozen=True, kw_only=True):
    """Bytes that leave the provider."""

    key: str
    per_gb: float


class Power(Line, frozen=True, kw_only=True):
    key: str
    per_kwh: float


class Purchase(Line, frozen=True, kw_only=True):
    """A node, new."""

    node: str
    per_node: float


class Colocation(Line, frozen=True, kw_only=True):
    """Space, cooling and connection for a kW drawn, without electricity."""

    key: str
    per_kw_month: float


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """What a device costs an hour: one price where one was named, else the median of `count`, between `low` and `high`.

    `term_months`: how long a reservation at that price binds, where it says so.
    """

    kind: Kind
    per_device_hour: float
    low: float
    high: float
    count: int
    provider: str
    date: datetime.date
    source: str
    term_months: float | None = None


class Prices(msgspec.Struct, frozen=True, kw_only=True):
    """All prices of one file, or of the user's file before those of the snapshot."""

    currency: str
    rent: tuple[Rent, ...] = ()
    storage: tuple[Storage, ...] = ()
    egress: tuple[Egress, ...] = ()
    power: tuple[Power, ...] = ()
    purchase: tuple[Purchase, ...] = ()
    colocation: tuple[Colocation, ...] = ()
    first: Prices | None = None

    def offer(self, what: str, kind: Kind = "on-demand") -> Offer:
        """The price of a device by its key, or of a device of a node type by that.

        A node's own price goes before those of its device elsewhere; several are summed up by their median.

        Raises:
            UsageError: nobody offers it at that kind of price; names the kinds that there are.
        """
        for prices in (self.first, self):
            found = prices._offers(what, kind) if prices is not None else []
            if found:
                return _median(found)
        raise self._no_offer(what, kind)

    def _offers(self, what: str, kind: Kind) -> list[Rent]:
        sold = find_node(what)
        if sold is not None:
            own = [rent for rent in self.rent if rent.kind == kind and rent.node == sold.key]
            if own:
                return own
        key = sold.device if sold is not None else what
        return [rent for rent in self.rent if rent.kind == kind and rent.device == key]

    def _no_offer(self, what: str, kind: Kind) -> UsageError:
        others = [k for k in KINDS if any(p._offers(what, k) for p in (self.first, self) if p is not None)]
        return UsageError(
            f"no {kind} price of {what} is known" + (f"; there is one {' and '.join(others)}" if others else ""),
            key="--price",
            values={"what": what, "kind": kind, "kinds": others},
            hint=f"Use --price {others[0]}, or give your own with --prices FILE." if others else
            "Give your own with --prices FILE: [[rent]] with kind, device, per_device_hour, date.",
        )  # fmt: skip

    def bought(self, node: str) -> Purchase | None:
        """What a new node of a type, or of one with the same device, costs."""
        sold = find_node(node)
        for prices in (self.first, self):
            for purchase in prices.purchase if prices is not None else ():
                if purchase.node == (sold.key if sold is not None else node):
                    return purchase
        return None

    def all_of(self, table: str) -> tuple[Any, ...]:
        """The lines of a table, the user's own first."""
        own = getattr(self.first, table) if self.first is not None else ()
        return (*own, *getattr(self, table))


def _median(rents: list[Rent]) -> Offer:
    """The lower of the two middle ones where their number is even: a price that somebody asks."""
    ordered = sorted(rents, key=lambda rent: rent.per_device_hour or 0.0)
    middle = ordered[(len(ordered) - 1) // 2]
    return Offer(
        kind=middle.kind, per_device_hour=middle.per_device_hour or 0.0, low=ordered[0].per_device_hour or 0.0,
        high=ordered[-1].per_device_hour or 0.0, count=len(ordered), provider=middle.provider, date=middle.date,
        source=middle.source, term_months=middle.term_months,
    )  # fmt: skip

"""Prices with their dates: the snapshot beside this file, and the user's own file, which goes first. No torch."""

from __future__ import annotations

import datetime
import tomllib
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from paceline.cluster.catalogue import device_names
from paceline.cluster.nodes import NodeType, find_node, node_names
from paceline.config import nearest
from paceline.errors import UsageError

SNAPSHOT = Path(__file__).with_name("prices.toml")
SCHEMA = "paceline.prices/1"

Kind = Literal["on-demand", "reserved", "spot"]
KINDS: tuple[Kind, ...] = get_args(Kind)

AGREE = 0.005
"""Relative difference of two prices of the same thing that rounding explains."""

PLAUSIBLE = (0.01, 100.0)
"""A device's price an hour, in currency units; outside, the unit is another one (cents, a month)."""


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
    """What a device costs an hour: one price where one was named, else the median of `count`, between `low` and `high`."""

    kind: Kind
    per_device_hour: float
    low: float
    high: float
    count: int
    provider: str
    date: datetime.date
    source: str


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


def load_prices(own: Path | None = None) -> Prices:
    """The snapshot, with the user's file before it where one is given.

    A file in another currency stands alone: sums are never made over two.

    Raises:
        UsageError: the file is missing or no price file, a price has no date, its units contradict each other, or what it
            is of is unknown.
    """
    snapshot = _snapshot()
    if own is None:
        return snapshot
    try:
        table = tomllib.loads(own.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {own}: {error.strerror}", key="--prices", values={"path": str(own)}) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{own} is not TOML: {error}", key="--prices", values={"path": str(own)}) from None
    mine = _prices(table, own)
    return mine if mine.currency != snapshot.currency else msgspec.structs.replace(snapshot, first=mine)


@cache
def _snapshot() -> Prices:
    return _prices(tomllib.loads(SNAPSHOT.read_text(encoding="utf-8")), SNAPSHOT)


TABLES: dict[str, type[Line]] = {
    "rent": Rent, "storage": Storage, "egress": Egress, "power": Power, "purchase": Purchase, "colocation": Colocation,
}  # fmt: skip


def _prices(table: dict[str, Any], path: Path) -> Prices:
    schema = table.pop("schema", SCHEMA)
    if schema != SCHEMA:
        raise _wrong(path, f"has the schema {schema!r}, and this version reads {SCHEMA!r}")
    currency, dated = table.pop("currency", "USD"), table.pop("date", None)
    unknown = sorted(set(table) - set(TABLES))
    if unknown:
        near = nearest(unknown[0], TABLES)
        known = f"Did you mean [[{near}]]?" if near else f"Tables: {', '.join(TABLES)}; and currency, date."
        raise _wrong(path, f"has {unknown[0]!r}, which is none of the tables of prices", known)
    lines: dict[str, Any] = {}
    for name, kind in TABLES.items():
        entries = table.get(name, [])
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise _wrong(path, f"writes {name} as one table", f"Write [[{name}]], once a price.")
        lines[name] = tuple(
            _line(kind, entry, f"[[{name}]] number {number}", dated, path) for number, entry in enumerate(entries, 1)
        )
    return Prices(currency=currency, **lines)


def _line(kind: type[Line], entry: dict[str, Any], place: str, dated: object, path: Path) -> Line:
    if "date" not in entry and dated is None:
        raise _wrong(path, f"{place} has no date", "A price without a date is no price: add date = 2026-11-09.")
    fields = kind.__struct_fields__
    unknown = sorted(set(entry) - set(fields))
    if unknown:
        raise _wrong(path, f"{place} has {unknown[0]!r}", f"Its keys: {', '.join(fields)}.")
    try:
        line = msgspec.convert({"date": dated, **entry}, kind)
    except msgspec.ValidationError as error:
        raise _wrong(path, f"{place}: {error}") from None
    for field in fields:
        amount = getattr(line, field)
        if field.startswith("per_") and amount is not None and not 0 <= amount < 1e12:
            raise _wrong(path, f"{place}: {field} = {amount} is no price")
    if isinstance(line, Rent):
        return _rent(line, place, path)
    if isinstance(line, Purchase):
        _known_node(line.node, place, path)
    return line


def _rent(rent: Rent, place: str, path: Path) -> Rent:
    """The same with the price of a device, after every check of its units."""
    sold = _known_node(rent.node, place, path) if rent.node is not None else None
    device = rent.device or (sold.device if sold is not None else None)
    if device is None:
        raise _wrong(path, f"{place} says neither node nor device", 'Add device = "h100-sxm" or node = "p5.48xlarge".')
    if device not in device_names():
        near = nearest(device, device_names())
        raise _wrong(
            path, f"{place}: no device {device!r} in the catalogue", f"Did you mean {near}?" if near else
            f"Known: {', '.join(device_names())}.",
        )  # fmt: skip
    if sold is not None and device != sold.device:
        raise _wrong(path, f"{place}: {sold.key} has {sold.device}, not {device}", "Remove one of node and device.")
    price = rent.per_device_hour
    if rent.per_node_hour is not None:
        if sold is None:
            raise _wrong(path, f"{place}: per_node_hour needs a node", "Add node, or write per_device_hour.")
        each = rent.per_node_hour / sold.devices
        if price is not None and abs(price - each) > AGREE * max(price, each):
            raise _wrong(
                path,
                f"{place} contradicts itself: {rent.per_node_hour:g} per node and hour is {each:g} for each of "
                f"{sold.devices} devices, and per_device_hour is {price:g}",
                "Remove one of them.",
            )
        price = each
    if price is None:
        raise _wrong(path, f"{place} has no price", "Add per_device_hour or per_node_hour.")
    if not PLAUSIBLE[0] <= price <= PLAUSIBLE[1]:
        raise _wrong(
            path,
            f"{place}: {price:g} per device and hour is no price of a device",
            "Is it in cents, or for a month? Write it in whole units of the currency for one hour.",
        )
    return msgspec.structs.replace(rent, device=device, per_device_hour=price, node=sold.key if sold else None)


def _known_node(key: str, place: str, path: Path) -> NodeType:
    sold = find_node(key)
    if sold is None:
        near = nearest(key, node_names())
        raise _wrong(
            path, f"{place}: no node type {key!r} in the catalogue", f"Did you mean {near}?" if near else
            f"Known: {', '.join(node_names())}.",
        )  # fmt: skip
    return sold


def _median(rents: list[Rent]) -> Offer:
    """The lower of the two middle ones where their number is even: a price that somebody asks."""
    ordered = sorted(rents, key=lambda rent: rent.per_device_hour or 0.0)
    middle = ordered[(len(ordered) - 1) // 2]
    return Offer(
        kind=middle.kind, per_device_hour=middle.per_device_hour or 0.0, low=ordered[0].per_device_hour or 0.0,
        high=ordered[-1].per_device_hour or 0.0, count=len(ordered), provider=middle.provider, date=middle.date,
        source=middle.source,
    )  # fmt: skip


def _wrong(path: Path, what: str, hint: str = "docs/guide/money.md shows one.") -> UsageError:
    return UsageError(f"{path}: {what}", key="--prices", values={"path": str(path)}, hint=hint)

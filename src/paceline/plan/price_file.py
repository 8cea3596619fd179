"""Reads prices: the snapshot beside this file, and the user's own file, which goes first. No torch."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from paceline.cluster.catalogue import device_names
from paceline.cluster.nodes import NodeType, find_node, node_names
from paceline.config import nearest
from paceline.errors import UsageError
from paceline.plan.prices import Colocation, Egress, Line, Power, Prices, Purchase, Rent, Storage

SNAPSHOT = Path(__file__).with_name("prices.toml")
SCHEMA = "paceline.prices/1"

AGREE = 0.005
"""Relative difference of two prices of the same thing that rounding explains."""

PLAUSIBLE = (0.01, 100.0)
"""A device's price an hour, in currency units; outside, the unit is another one (cents, a month)."""


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
    if not isinstance(currency, str) or not currency.isalpha():
        raise _wrong(path, f"has the currency {currency!r}", 'Write it as in currency = "USD".')
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


def _wrong(path: Path, what: str, hint: str = "docs/guide/money.md shows one.") -> UsageError:
    return UsageError(f"{path}: {what}", key="--prices", values={"path": str(path)}, hint=hint)

"""What a run costs: devices by the hour at a dated price, over the time that it takes with its failures. No torch."""

from __future__ import annotations

from typing import Any

import msgspec

from paceline.cluster.nodes import find_node
from paceline.errors import UsageError
from paceline.plan.failures import Outlook
from paceline.plan.prices import Kind, Offer, Prices
from paceline.units import format_money, format_percent, format_seconds

HOUR, DAY = 3600.0, 86400.0
HOURS_PER_MONTH = 730.5
GB = 1e9


class Money(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of a run in `currency`, with its arithmetic.

    total: compute, storage and egress. low, high: the same at the lowest and the highest price of that kind that is known.
    devices: paid for, spare nodes and the rest of the last node included. wall_seconds: with saves and failures.
    """

    currency: str
    total: float
    low: float
    high: float
    compute: float
    storage: float
    egress: float
    devices: int
    wall_seconds: float
    offer: Offer
    derivation: tuple[str, ...]

    def to_record(self) -> dict[str, Any]:
        record = msgspec.to_builtins(self)
        offer = record.pop("offer")
        return {
            **record,
            "price_kind": offer["kind"],
            "per_device_hour": offer["per_device_hour"],
            "price_date": offer["date"],
            "price_provider": offer["provider"],
            "price_source": offer["source"],
            "prices_compared": offer["count"],
        }


def cost_of(
    run_seconds: float,
    devices: int,
    what: str,
    prices: Prices,
    *,
    kind: Kind = "on-demand",
    outlook: Outlook | None = None,
    stored_bytes: float = 0.0,
    egress_bytes: float = 0.0,
) -> Money:
    """The expected cost of a run.

    Args:
        run_seconds: without saves and failures, steps times seconds of a step.
        devices: of the run, without spares.
        what: key of the device, or of a node type as sold, which is paid for whole.
        prices: `load_prices()`.
        kind: of price.
        outlook: what failures do to it (`plan/failures.py`); None: nothing fails and nothing is saved.
        stored_bytes: kept while it runs: checkpoints and data.
        egress_bytes: that leave the provider afterwards.

    Raises:
        UsageError: nobody offers it at that kind of price, or a number is not above 0.
    """
    if run_seconds < 0 or devices < 1:
        raise UsageError(f"a run of {run_seconds:g} s on {devices} devices has no cost", values={"devices": devices})
    offer = prices.offer(what, kind)
    wall = run_seconds if outlook is None else outlook.wall_seconds(run_seconds)
    paid = _paid(devices, what, outlook)
    hours = paid * wall / HOUR
    compute = hours * offer.per_device_hour
    lines = [_price_line(offer, prices.currency, what), *_time_lines(run_seconds, wall, paid, devices, outlook)]
    lines.append(
        f"{_hours(hours)} device-hours x {offer.per_device_hour:.2f} = {format_money(compute, prices.currency)}"
    )
    if offer.term_months:
        bound = paid * offer.term_months * HOURS_PER_MONTH * offer.per_device_hour
        lines.append(
            f"reserved for {offer.term_months:g} months: {paid} devices are paid for as long, "
            f"{format_money(bound, prices.currency)}, whatever else runs on them"
        )
    kept, kept_line = _storage(stored_bytes, wall, prices)
    out, out_line = _egress(egress_bytes, offer.provider, prices)
    lines += [line for line in (kept_line, out_line) if line]
    beside = kept + out
    return Money(
        currency=prices.currency, total=compute + beside, low=hours * offer.low + beside, high=hours * offer.high + beside,
        compute=compute, storage=kept, egress=out, devices=paid, wall_seconds=wall, offer=offer, derivation=tuple(lines),
    )  # fmt: skip


def _paid(devices: int, what: str, outlook: Outlook | None) -> int:
    """Devices that are paid for: whole nodes where nodes are sold, and the spare ones."""
    sold = find_node(what)
    each = sold.devices if sold is not None else 1
    whole = -(-devices // each) * each
    return whole if outlook is None else whole + outlook.fleet.spares * outlook.fleet.devices_per_node


def _hours(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.2f}"


def _price_line(offer: Offer, currency: str, what: str) -> str:
    price = f"{what}, {offer.kind}: {offer.per_device_hour:.2f} {currency} per device and hour"
    if offer.count > 1:
        price += f", the median of {offer.count} offers between {offer.low:.2f} and {offer.high:.2f}"
    return f"{price} ({offer.provider}, {offer.date.isoformat()}: {offer.source})"


def _time_lines(run_seconds: float, wall: float, paid: int, devices: int, outlook: Outlook | None) -> list[str]:
    if outlook is None:
        return [f"{devices} devices for {format_seconds(run_seconds)}; failures and saves are left out"]
    spares = f" and {paid - devices} spare" if paid > devices else ""
    return [
        f"{devices} devices{spares} for {format_seconds(run_seconds)} / goodput {format_percent(outlook.goodput)} = "
        f"{format_seconds(wall)}"
    ]


def _storage(stored_bytes: float, wall: float, prices: Prices) -> tuple[float, str | None]:
    lines = prices.all_of("storage")
    if stored_bytes <= 0:
        return 0.0, None
    if not lines:
        return 0.0, f"storage is left out: no price of it is known in {prices.currency}"
    months = wall / HOUR / HOURS_PER_MONTH
    amount = stored_bytes / GB * months * lines[0].per_gb_month
    return amount, (
        f"{stored_bytes / GB:,.0f} GB for {months:.2f} months x {lines[0].per_gb_month:g} = "
        f"{format_money(amount, prices.currency)} ({lines[0].key}, {lines[0].date.isoformat()})"
    )


def _egress(egress_bytes: float, provider: str, prices: Prices) -> tuple[float, str | None]:
    if egress_bytes <= 0:
        return 0.0, None
    line = next((line for line in prices.all_of("egress") if line.key == provider), None)
    if line is None:
        return 0.0, f"egress is left out: no price of it is known for {provider}"
    amount = egress_bytes / GB * line.per_gb
    return amount, f"{egress_bytes / GB:,.0f} GB out x {line.per_gb:g} = {format_money(amount, prices.currency)}"


class Premium(msgspec.Struct, frozen=True, kw_only=True):
    """A faster network against a slower one, for the same run.

    days, days_saved: with the slower one, and less with the faster. extra: more paid with the faster; below 0 it is cheaper.
    worth: the premium per device and hour up to which the faster one costs no more, since it is rented for less time.
    """

    days: float
    days_saved: float
    extra: float
    worth: float
    currency: str
    derivation: tuple[str, ...]

    @property
    def per_day(self) -> float:
        """Paid per day saved; 0 where it is cheaper anyway."""
        return max(0.0, self.extra) / self.days_saved if self.days_saved > 0 else float("inf")

    def to_record(self) -> dict[str, Any]:
        return {**msgspec.to_builtins(self), "per_day": self.per_day}


def interconnect_premium(
    slow_seconds: float, fast_seconds: float, devices: int, per_device_hour: float, premium_per_device_hour: float,
    currency: str = "USD",
) -> Premium:  # fmt: skip
    """What a faster network costs, and what it saves, over a run of `slow_seconds` without and `fast_seconds` with it.

    Raises:
        UsageError: a time or a price is not above 0.
    """
    if min(slow_seconds, fast_seconds, per_device_hour) <= 0 or devices < 1:
        raise UsageError(
            f"{slow_seconds:g} s and {fast_seconds:g} s on {devices} devices at {per_device_hour:g}: all must be above 0",
            values={"slow_seconds": slow_seconds, "fast_seconds": fast_seconds},
        )
    slow = devices * slow_seconds / HOUR * per_device_hour
    fast = devices * fast_seconds / HOUR * (per_device_hour + premium_per_device_hour)
    worth = per_device_hour * (slow_seconds / fast_seconds - 1)
    saved = (slow_seconds - fast_seconds) / DAY
    lines = (
        f"{slow_seconds / DAY:.2f} days become {fast_seconds / DAY:.2f}: {saved:.2f} days saved",
        f"{format_money(slow, currency)} become {format_money(fast, currency)} at {premium_per_device_hour:.2f} more per "
        f"device and hour: {format_money(abs(fast - slow), currency)} {'more' if fast > slow else 'less'}",
        f"it costs no more up to {per_device_hour:.2f} x ({slow_seconds / fast_seconds:.3f} - 1) = {worth:.2f} more per "
        "device and hour",
    )
    return Premium(
        days=slow_seconds / DAY, days_saved=saved, extra=fast - slow, worth=worth, currency=currency, derivation=lines
    )

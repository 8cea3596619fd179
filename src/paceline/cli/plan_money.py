"""The options of `paceline plan` about money and failures. Standard library only at import."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

    from paceline.cluster.spec import Cluster
    from paceline.plan.compare import Pay

KINDS = ("on-demand", "reserved", "spot")


def add_money_arguments(parser: argparse.ArgumentParser) -> None:
    """`--price`, `--prices`, `--spares`, `--simulate`."""
    group = parser.add_argument_group("money and failures")
    group.add_argument("--price", choices=KINDS, help="kind of price (on-demand)")
    group.add_argument(
        "--prices", metavar="FILE", help="your own prices, before the dated ones that ship: docs/guide/money.md"
    )
    group.add_argument("--spares", type=int, metavar="N", help="nodes that stand by (the cheapest number)")
    group.add_argument("--restart", metavar="TIME", help="from a failure until training goes on (10m)")
    group.add_argument("--repair", metavar="TIME", help="until a failed node, or another for it, is there (24h)")
    group.add_argument(
        "--utilisation", type=float, default=1.0, metavar="SHARE", help="of a node of your own, for rent or buy (1.0)"
    )
    group.add_argument(
        "--simulate", type=float, metavar="DAYS", help="play so many days of failures beside the closed form"
    )


def pay_of(args: argparse.Namespace) -> Pay:
    """What fills a plan's document with the costs that these options ask for.

    Raises:
        UsageError: an option or the price file is wrong. Later, where a kind of price was asked for and is not known.
    """
    from pathlib import Path

    from paceline.errors import UsageError
    from paceline.plan.economics import Asked
    from paceline.plan.failures import REPAIR_SECONDS, RESTART_SECONDS
    from paceline.plan.price_file import load_prices
    from paceline.plan.priced import price_plan, sold_as

    if args.simulate is not None and not 0 < args.simulate <= 3650:
        raise UsageError(
            f"--simulate {args.simulate:g}: days, above 0 and at most 3650",
            key="--simulate",
            values={"days": args.simulate},
            hint="For example --simulate 90.",
        )
    prices = load_prices(Path(args.prices) if args.prices else None)
    restart, repair = _time(args.restart, "--restart", RESTART_SECONDS), _time(args.repair, "--repair", REPAIR_SECONDS)

    def pay(document: dict[str, Any], cluster: Cluster) -> None:
        what = sold_as(cluster)
        if args.price is not None:
            prices.offer(what, args.price)
        asked = Asked(
            what=what, kind=args.price or "on-demand", spares=args.spares, restart_seconds=restart,
            repair_seconds=repair, simulate_days=args.simulate, utilisation=args.utilisation,
        )  # fmt: skip
        price_plan(document, cluster, asked, prices)

    return pay


def _time(text: str | None, option: str, otherwise: float) -> float:
    from paceline.errors import UsageError
    from paceline.units import parse_seconds

    if text is None:
        return otherwise
    try:
        return float(parse_seconds(text))
    except ValueError as error:
        raise UsageError(str(error), key=option, values={"value": text}, hint=f"For example {option} 10m.") from None


def money_text(document: dict[str, Any]) -> str:
    """The plan's section of money and goodput."""
    from paceline.plan.economics_text import describe
    from paceline.plan.priced import premium_text
    from paceline.plan.text import wrapped

    found = document.get("economics") or {}
    lines = [describe(found) if "goodput" in found else f"no cost: {found.get('cost_reason', '')}"]
    lines += [line for premium in document.get("premiums", ()) for line in wrapped(premium_text(premium))]
    return "\n".join(lines)

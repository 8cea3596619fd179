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
    from paceline.plan.priced import price_plan, sold_as
    from paceline.plan.prices import load_prices

    if args.simulate is not None and not 0 < args.simulate <= 3650:
        raise UsageError(
            f"--simulate {args.simulate:g}: days, above 0 and at most 3650",
            key="--simulate",
            values={"days": args.simulate},
            hint="For example --simulate 90.",
        )
    prices = load_prices(Path(args.prices) if args.prices else None)

    def pay(document: dict[str, Any], cluster: Cluster) -> None:
        what = sold_as(cluster)
        if args.price is not None:
            prices.offer(what, args.price)
        asked = Asked(what=what, kind=args.price or "on-demand", spares=args.spares, simulate_days=args.simulate)
        price_plan(document, cluster, asked, prices)

    return pay


def money_text(document: dict[str, Any]) -> str:
    """The plan's section of money and goodput."""
    from paceline.plan.economics import describe

    found = document.get("economics") or {}
    return describe(found) if "goodput" in found else f"no cost: {found.get('cost_reason', '')}"

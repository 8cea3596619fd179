"""Collectives and faults on shaped links between hosts of one machine: rates against the links', factors and names found.

    python -m benchmarks.netlab_rates          # needs root, iproute2 and util-linux, as tests/netlab does

Rates: bytes over the busiest link, 4 MiB, the best of five calls, as shares of the shaped rate; a frame of 1514 bytes
carries 1448 of payload, so 95.6% is all there is. Faults: `draw_case` draws kind, place and size; the draws are printed.
"""

from __future__ import annotations

import secrets
import statistics
import sys
from typing import Any

from tests.netlab.cases import KINDS, Case, draw_case, wrong
from tests.netlab.collectives import bus_bandwidths
from tests.netlab.fabrics import MBIT, study_case
from tests.netlab.lab import Lab

from benchmarks.program import finish, parser
from benchmarks.record import Figure, say
from paceline.bench.fabric_findings import findings_of, uplinks

COLLECTIVES = ("all_reduce", "all_gather", "broadcast", "send_recv")
RATES = (100.0, 200.0, 1000.0)
SHARE = 0.9
RACKS = (2, 2)
FACTOR, WITHIN = 4.0, 0.4
DRAWS, REPEATS = 20, 3


def rate_figures(ranks: int, rates: tuple[float, ...]) -> list[Figure]:
    """Of each collective at each rate, on as many hosts of one rack.

    Of a broadcast only between two: how many copies Gloo's root sends to more of them is not known here.
    """
    figures = []
    kinds = COLLECTIVES if ranks == 2 else tuple(kind for kind in COLLECTIVES if kind != "broadcast")
    with Lab(racks=(ranks,)) as lab:
        for mbit in rates:
            for host in lab.hosts:
                lab.link(host, mbit)
            found = lab.crew.run(bus_bandwidths, ranks, kinds, timeout=120.0)
            for name in kinds:
                share = min(one[name] for one in found) * 8 / (mbit * 1e6)
                figures.append(
                    Figure(f"{name}, {ranks} hosts, {mbit:g} Mbit/s", f">= {SHARE:.0%}", f"{share:.1%}", share >= SHARE)
                )
                say(f"  {figures[-1].name}: {figures[-1].measured}")
    return figures


def factor_figure(lab: Lab, repeats: int) -> Figure:
    """An uplink of a quarter of its hosts' links."""
    case, found = Case("oversubscribed", RACKS, size=FACTOR), []
    for seed in range(repeats):
        study = study_case(lab, case, seed)
        found.append((uplinks(study)[0].factor, wrong(case, study.hosts, findings_of(study))))
    factors = [factor for factor, _ in found]
    return Figure(
        f"factor of an uplink of a quarter, {repeats} studies",
        f"{FACTOR} +- {WITHIN}, named",
        f"{min(factors):.2f} to {max(factors):.2f}, median {statistics.median(factors):.2f}; "
        f"{sum(problem is None for _, problem in found)} named",
        all(abs(factor - FACTOR) <= WITHIN and problem is None for factor, problem in found),
    )


def draw_figure(lab: Lab, draws: int) -> tuple[Figure, list[dict[str, Any]]]:
    """Drawn faults and sound fabrics, each judged by the draw that made it."""
    first, told = secrets.randbelow(10**6), []
    for seed in range(first, first + draws):
        case = draw_case(seed, KINDS[seed % len(KINDS)], RACKS)
        study = study_case(lab, case, seed)
        problem = wrong(case, study.hosts, findings_of(study))
        told.append({"seed": seed, "case": str(case), "problem": problem})
        say(f"  seed {seed}: {case}: {problem or 'right'}")
    right = sum(one["problem"] is None for one in told)
    return Figure(f"{draws} drawn faults at {MBIT:g} Mbit/s", f"{draws} right", f"{right} right", right == draws), told


def main() -> int:
    args = parser(__doc__).parse_args()
    figures = rate_figures(2, RATES[:1] if args.quick else RATES)
    if not args.quick:
        figures += rate_figures(4, RATES[:1])
    with Lab(racks=RACKS) as lab:
        figures.append(factor_figure(lab, 1 if args.quick else REPEATS))
        drawn, told = draw_figure(lab, len(KINDS) if args.quick else DRAWS)
    return finish("netlab_rates", [*figures, drawn], {"draws": told}, args, [])


if __name__ == "__main__":
    sys.exit(main())

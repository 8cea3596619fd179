"""A fabric as arithmetic: flows share links and uplinks max-min fairly, and the measured rates have noise."""

from __future__ import annotations

import random
from collections.abc import Sequence

from paceline.bench.pairs import Flow, Seen
from tests.netlab.cases import Case

LINK = 12e6
"""Bytes per second of a sound link: no rate of a real one matters to the arithmetic."""

SEGMENTS = 2000

Resource = tuple[str, int]


class Model:
    """The fabric of a case. `measure` is what the measuring ranks would return.

    Args:
        order: place of each host in the racks: host k stands where `order[k]` says.
        noise: relative standard deviation of a measured rate.
    """

    def __init__(self, case: Case, seed: int, order: Sequence[int] | None = None, noise: float = 0.02) -> None:
        self.case = case
        self.order = list(order) if order is not None else list(range(sum(case.racks)))
        self.noise = noise
        self.flows = 0
        self._draw = random.Random(seed)
        self._rack = [rack for rack, count in enumerate(case.racks) for _ in range(count)]

    @property
    def hosts(self) -> list[str]:
        return [f"h{k}" for k in range(len(self.order))]

    def rack(self, host: int) -> int:
        return self._rack[self.order[host]]

    def measure(self, flows: Sequence[Flow], company: str = "alone") -> list[Seen]:
        self.flows += len(flows)
        rates = max_min({flow: self._way(flow) for flow in flows}, self._capacity)
        return [self._seen(flow, rates[flow]) for flow in flows]

    def _way(self, flow: Flow) -> list[Resource]:
        links = [("out", flow.source), ("into", flow.target)]
        racks = self.rack(flow.source), self.rack(flow.target)
        return links if racks[0] == racks[1] else [*links, ("up", racks[0]), ("down", racks[1])]

    def _capacity(self, resource: Resource) -> float:
        kind, number = resource
        if kind in ("up", "down"):
            return LINK * self.case.uplink(number)
        return LINK * self.case.link(number, "out" if kind == "out" else "into")

    def _seen(self, flow: Flow, rate: float) -> Seen:
        loss = max(self.case.loss(flow.source), self.case.loss(flow.target))
        slowed = self._draw.uniform(0.3, 1.0) if loss else 1.0
        resent = self._draw.uniform(0.5, 1.0) * loss if loss else self._draw.choice((0.0, 0.0, 0.0, 1 / SEGMENTS))
        noisy = rate * slowed * max(0.5, self._draw.gauss(1, self.noise))
        return Seen(
            *flow,
            noisy,
            error=self.noise,
            stalled=self._draw.uniform(0, 0.5) if loss else 0.0,
            resent=resent,
            segments=SEGMENTS,
        )


def max_min(ways: dict[Flow, list[Resource]], capacity: object) -> dict[Flow, float]:
    """Max-min fair rates: all flows grow alike until a resource is full, which fixes those over it."""
    rates: dict[Flow, float] = {}
    left = {resource: capacity(resource) for way in ways.values() for resource in way}  # type: ignore[operator]
    while len(rates) < len(ways):
        open_flows = [flow for flow in ways if flow not in rates]
        share = {r: left[r] / n for r in left if (n := sum(1 for flow in open_flows if r in ways[flow]))}
        fullest = min(share, key=lambda r: share[r])
        for flow in [flow for flow in open_flows if fullest in ways[flow]]:
            rates[flow] = share[fullest]
            for resource in ways[flow]:
                left[resource] -= share[fullest]
    return rates

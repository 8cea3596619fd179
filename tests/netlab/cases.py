"""Faults of a fabric, drawn, and what must be said of each: for the model in tests/bench and for the lab's real links."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from paceline.bench.fabric_faults import Way
from paceline.bench.fabric_findings import Finding

Kind = Literal["healthy", "slow", "asymmetric", "lossy", "oversubscribed"]
KINDS: tuple[Kind, ...] = ("healthy", "slow", "asymmetric", "lossy", "oversubscribed")


class Case(NamedTuple):
    """One fault of a fabric of racks with links of rate 1. `size` is the factor of a slow link or uplink, or the loss."""

    kind: Kind
    racks: tuple[int, ...]
    host: int = 0
    way: Way = "out"
    size: float = 1.0

    def link(self, host: int, way: Way) -> float:
        """Rate of one direction of a host's link, as a share of the usual one."""
        ways = {"slow": ("out", "into"), "asymmetric": (self.way,)}.get(self.kind, ())
        return 1 / self.size if host == self.host and way in ways else 1.0

    def uplink(self, rack: int) -> float:
        """Rate of a rack's uplink, in links: all that its hosts can send, or less where it is oversubscribed."""
        return self.racks[rack] / (self.size if self.kind == "oversubscribed" else 1.0)

    def loss(self, host: int) -> float:
        return self.size if self.kind == "lossy" and host == self.host else 0.0


def draw_case(seed: int, kind: Kind, racks: tuple[int, ...]) -> Case:
    """A fault of a kind, its place and its size drawn from a seed."""
    draw = random.Random(seed)
    way: Way = draw.choice(("out", "into"))
    size = round(draw.uniform(0.02, 0.08), 3) if kind == "lossy" else round(draw.uniform(2.0, 10.0), 1)
    if kind == "oversubscribed":
        size = round(draw.uniform(1.6, 6.0), 1)
    return Case(kind, racks, draw.randrange(sum(racks)), way, 1.0 if kind == "healthy" else size)


def wrong(case: Case, hosts: Sequence[str], findings: Sequence[Finding], tolerance: float = 0.15) -> str | None:
    """What is wrong with the findings, or None: the one right finding with the right place and size, and no other."""
    text = "; ".join(f"{finding.id} {finding.host}: {finding.found}" for finding in findings) or "nothing"
    problem = f"{case} on {' '.join(hosts)}: found {text}"
    if case.kind == "healthy":
        return problem if findings else None
    if case.kind == "oversubscribed":
        return None if findings and all(_is_uplink(case, finding, tolerance) for finding in findings) else problem
    wanted = {"slow": "link-slow", "asymmetric": "link-asymmetric", "lossy": "link-loses"}[case.kind]
    if len(findings) != 1 or findings[0].id != wanted or findings[0].host != hosts[case.host]:
        return problem
    found = findings[0].found
    if case.kind == "lossy":
        return None
    said = float(re.findall(r"factor of ([\d.]+)", found)[0])
    words = (
        {"out": "in what it sends:", "into": "in what it is sent:"}[case.way]
        if case.kind == "asymmetric"
        else "both ways"
    )
    return None if words in found and abs(said / case.size - 1) <= tolerance else problem


def _is_uplink(case: Case, finding: Finding, tolerance: float) -> bool:
    said = re.findall(r"oversubscribed ([\d.]+) \+- [\d.]+ to 1", finding.found)
    return finding.id == "uplink-oversubscribed" and abs(float(said[0]) / case.size - 1) <= tolerance

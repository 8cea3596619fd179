"""`paceline bench fabric`: starts or joins the ranks, and turns what they saw into findings. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from paceline.bench.fabric_findings import Finding, Placement, findings_of, placement_of, uplinks
from paceline.bench.fabric_study import Company, Study
from paceline.bench.pairs import Seen
from paceline.bench.ranks import Told, check_procs, joins_others, run_ranks
from paceline.errors import PacelineError
from paceline.units import format_bandwidth, format_percent

RANK_MODULE = "paceline.bench.fabric_rank"


class Flown(msgspec.Struct, frozen=True):
    """A flow as a row: `company` says what else was under way, bandwidth is in GB/s (10^9)."""

    company: Company
    source: str
    target: str
    bandwidth: float
    error: float
    stalled: float
    resent: float | None


class Result(msgspec.Struct):
    """What came of a measurement; `error` where it did not come to its end."""

    hosts: list[str]
    several: bool
    rows: list[Flown]
    findings: list[Finding]
    placement: Placement | None
    groups: list[list[str]]
    uplinks: list[dict[str, Any]]
    error: PacelineError | None = None

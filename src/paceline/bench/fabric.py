"""`paceline bench fabric`: starts or joins the ranks, and turns what they saw into findings. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from paceline.bench.fabric_findings import Finding, Placement, Uplink, findings_of, placement_of, uplinks
from paceline.bench.fabric_study import Company, Study
from paceline.bench.pairs import Seen
from paceline.bench.ranks import Told, check_procs, collect, command_line, default_procs, joins_others, kept
from paceline.cluster.probe import probe_host
from paceline.errors import PacelineError

MODULE = "paceline.bench.fabric_rank"
COLLECTIVE_SECONDS = 60.0
"""Between flows the ranks meet; who has not come by then is taken for gone."""

GB = 1e9
ONE_HOST = (
    "All ranks are on one host: what is measured is its memory, not a fabric, and no link is judged. "
    "Start one rank on each host, with torchrun or with RANK, WORLD_SIZE, LOCAL_WORLD_SIZE and MASTER_ADDR set."
)


class Row(msgspec.Struct, frozen=True):
    """A flow. `company` says what else was under way: nothing (`alone`), every host with a partner (`together`), or a
    group against others (`across`). `bandwidth` in GB/s (10^9); the other figures are shares, as in `pairs.Seen`."""

    company: Company
    source: str
    target: str
    bandwidth: float
    error: float
    stalled: float
    resent: float | None


class Measured(NamedTuple):
    """A fabric as measured. `several`: there are several hosts, so that links were judged; `error`: what ended it early."""

    hosts: list[str]
    several: bool
    rows: list[Row]
    groups: list[list[str]]
    uplinks: list[Uplink]
    findings: list[Finding]
    placement: Placement | None
    error: PacelineError | None

    @property
    def exit_code(self) -> int:
        """0; what ended it early; 1 with findings."""
        return self.error.exit_code if self.error is not None else 1 if self.findings else 0

    def document(self) -> dict[str, Any]:
        """The document of `bench fabric --json`, less its schema."""
        return {
            "measurement": "fabric", "command": command_line(), "complete": self.error is None, "hosts": self.hosts,
            "several_hosts": self.several, "rows": msgspec.to_builtins(self.rows), "groups": self.groups,
            "uplinks": [uplink._asdict() | {"hosts": self.groups[uplink.group]} for uplink in self.uplinks],
            "findings": msgspec.to_builtins(self.findings),
            "placement": msgspec.to_builtins(self.placement) if self.placement is not None else None,
            "exit": self.exit_code,
        }  # fmt: skip


def measure(seconds: float, *, procs: int | None, start_seconds: float, say: Callable[[str], None]) -> Measured | None:
    """Measure the fabric between the hosts whose ranks a launcher started, or between ranks of this host alone.

    Args:
        seconds: how long each flow runs.
        start_seconds: until when all ranks must have come.
        say: told what is measured as it begins.

    Returns:
        None on ranks other than 0.

    Raises:
        UsageError: there is no second process.
    """
    ranks = 0
    if not joins_others():
        ranks = check_procs(procs if procs is not None else default_procs(probe_host(), "cpu"))
    given = {
        "seconds": seconds, "device": "cpu", "start_seconds": start_seconds,
        "collective_seconds": COLLECTIVE_SECONDS + seconds,
    }  # fmt: skip
    told = collect(MODULE, given, ranks, tell=lambda record: say(record["text"]) if record["kind"] == "note" else None)
    return None if told is None else measured_of(told)


def measured_of(told: Told) -> Measured:
    """What rank 0's records say. Links are judged where the study came to its end."""
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for record in told.records:
        by_kind.setdefault(record["kind"], []).append(record)
    about = by_kind.get("about", [{"hosts": [], "several": False}])[0]
    flows = [(record["company"], msgspec.convert(record["seen"], Seen)) for record in by_kind.get("flow", ())]
    rows = [_row(company, seen, about["hosts"]) for company, seen in flows]
    error = kept(told.error, len(rows)) if told.error is not None else None
    if "study" not in by_kind:
        return Measured(about["hosts"], about["several"], rows, [], [], [], None, error)
    study = msgspec.convert(by_kind["study"][0]["study"], Study)
    rows = _rows(study)
    if not about["several"]:
        return Measured(study.hosts, False, rows, [], [], [], None, error)
    findings = findings_of(study)
    groups = [[study.hosts[host] for host in group] for group in study.groups]
    return Measured(study.hosts, True, rows, groups, uplinks(study), findings, placement_of(study, findings), error)


def describe(measured: Measured) -> Iterator[str]:
    """A result as text: the two matrices, what is wrong, and where to place ranks."""
    if not measured.several and measured.hosts:
        yield ONE_HOST
    for company, title in (("alone", "one flow alone"), ("together", "all hosts at once, both ways")):
        rows = [row for row in measured.rows if row.company == company]
        if rows:
            yield f"GB/s from row to column, {title}:"
            yield from _matrix(measured.hosts, rows)
    for finding in measured.findings:
        yield f"{finding.severity}: {finding.found} [{finding.id}]"
        yield f"  {finding.why}"
        yield f"  {finding.mend}"
    if measured.several and measured.error is None and not measured.findings:
        yield f"{len(measured.hosts)} hosts: every link as fast as the others, none loses frames, no uplink limits."
    if measured.placement is not None:
        yield f"placement: {measured.placement.say}"


def _rows(study: Study) -> list[Row]:
    """The flows of a whole study: what was measured again stands once."""
    parts: list[tuple[Company, list[Seen]]] = [("alone", study.alone), ("together", study.together)]
    parts += [("across", turn) for across in study.across for turn in across.turns]
    return [_row(company, seen, study.hosts) for company, flows in parts for seen in flows]


def _row(company: Company, seen: Seen, hosts: Sequence[str]) -> Row:
    return Row(
        company=company, source=hosts[seen.source], target=hosts[seen.target], bandwidth=seen.bytes_per_second / GB,
        error=seen.error, stalled=seen.stalled, resent=seen.resent,
    )  # fmt: skip


def _matrix(hosts: Sequence[str], rows: Sequence[Row]) -> Iterator[str]:
    rates = {(row.source, row.target): row.bandwidth for row in rows}
    width = max(8, *(len(host) + 1 for host in hosts))
    yield " " * width + "".join(f"{host:>{width}}" for host in hosts)
    for source in hosts:
        cells = (f"{rates[source, t]:.4g}" if (source, t) in rates else "-" for t in hosts)
        yield f"{source:<{width}}" + "".join(f"{cell:>{width}}" for cell in cells)

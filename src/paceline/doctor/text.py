"""A report as text for people. Imports no torch."""

from __future__ import annotations

from collections import Counter

from paceline.doctor.check import ALL_HOSTS, Finding, NotChecked
from paceline.doctor.run import Report
from paceline.units import format_seconds


def describe(report: Report) -> str:
    """Findings, then what was not checked and why, then one line that sums up."""
    lines = [line for finding in report.findings for line in _finding(finding, len(report.hosts) > 1)]
    if report.smoke is not None and report.smoke["exit"] == 0:
        steps, procs, seconds = (report.smoke[key] for key in ("steps", "procs", "seconds"))
        lines += [f"smoke test: {steps} steps on {procs} ranks in {format_seconds(seconds)}", ""]
    lines += [f"measured: {found.describe()}" for found in report.measured]
    lines += _not_checked(report.not_checked, len(report.hosts) > 1)
    return "\n".join([*lines, _summary(report)])


def _finding(finding: Finding, several: bool) -> list[str]:
    where = f" on {finding.host}" if several and finding.host != ALL_HOSTS else ""
    rank = f" (rank {finding.rank})" if finding.rank is not None and several else ""
    return [
        f"{finding.severity}: {finding.id}{where}{rank}: {finding.found}",
        f"  why     {finding.why}",
        f"  mend    {finding.mend}",
        f"  source  {finding.source}",
        "",
    ]


def _not_checked(skipped: tuple[NotChecked, ...], several: bool) -> list[str]:
    """Checks with the same reason stand on one line."""
    groups: dict[str, list[str]] = {}
    for entry in skipped:
        where = f"{entry.host}: " if several and entry.host != ALL_HOSTS else ""
        groups.setdefault(f"{where}{entry.reason}", []).append(entry.id)
    if not groups:
        return []
    return ["not checked:", *(f"  {reason}: {', '.join(ids)}" for reason, ids in groups.items()), ""]


def _summary(report: Report) -> str:
    counts = Counter(finding.severity for finding in report.findings)
    parts = [f"{counts[s]} {s}{'s' * (counts[s] != 1)}" for s in ("error", "warning") if counts[s]]
    hosts = report.hosts
    where = hosts[0] if len(hosts) == 1 else f"{len(hosts) or 'no'} hosts"
    skipped = len({entry.id for entry in report.not_checked} - set(report.checked))
    made = f"{len(report.checked)} checks on {where}, {skipped} not made"
    return f"{made}: {', '.join(parts) if parts else 'nothing is wrong with what was checked'}"

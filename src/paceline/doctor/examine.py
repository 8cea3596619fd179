"""Makes every check on every host and lists what was not checked. Imports no torch."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Sequence
from functools import cache

import msgspec

from paceline.doctor import checks
from paceline.doctor.check import ALL_HOSTS, SEVERITIES, Check, Finding, Found, Given, NotChecked, Skip
from paceline.doctor.host import Host


class Examination(msgspec.Struct, frozen=True, kw_only=True):
    """What was found, what was not checked, and on which hosts."""

    hosts: tuple[str, ...]
    checked: tuple[str, ...]
    findings: tuple[Finding, ...]
    not_checked: tuple[NotChecked, ...]


@cache
def all_checks() -> tuple[Check, ...]:
    """The checks of the folder `checks/`, by file name."""
    names = sorted(module.name for module in pkgutil.iter_modules(checks.__path__))
    return tuple(importlib.import_module(f"{checks.__name__}.{name}").CHECK for name in names)


def examine(given: Given, selected: Sequence[Check] | None = None) -> Examination:
    """Every check on every host; differences between hosts first, then errors before warnings."""
    findings: list[tuple[int, int, Finding]] = []
    not_checked: list[NotChecked] = []
    made: set[str] = set()
    for check in all_checks() if selected is None else selected:
        for host in _subjects(check, given):
            reason = _obstacle(check, host, given)
            try:
                found = [] if reason else [_finding(check, host, f) for f in _look(check, host, given)]
            except Skip as skip:
                reason, found = str(skip), []
            if reason:
                not_checked.append(NotChecked(id=check.id, host=host.name if host else ALL_HOSTS, reason=reason))
                continue
            made.add(check.id)
            first = 0 if check.compare is not None else 1
            findings += [(first, SEVERITIES.index(f.severity), f) for f in found]
    findings.sort(key=lambda entry: entry[:2])
    return Examination(
        hosts=tuple(dict.fromkeys(host.name for host in given.hosts)),
        checked=tuple(sorted(made)),
        findings=tuple(_once_per_host(f for *_, f in findings)),
        not_checked=tuple(dict.fromkeys(not_checked)),
    )


def _subjects(check: Check, given: Given) -> Sequence[Host | None]:
    return [None] if check.compare is not None else given.hosts


def _obstacle(check: Check, host: Host | None, given: Given) -> str:
    """Why a check cannot be made, or nothing."""
    if check.job and given.job is None:
        return "no job was named: paceline doctor JOB.toml"
    if host is None:
        names = {h.name for h in given.hosts}
        if len(names) < 2 and len(given.hosts) < 2:
            return "one host; several with --from, or started by torchrun on each"
        return _missing(check, given.hosts)
    if check.gpus and not host.gpus and "gpus" not in host.missing:
        return "this host has no GPU"
    if check.rdma and not host.rdma and "rdma" not in host.missing:
        return "this host has no RDMA device"
    return _missing(check, [host])


def _missing(check: Check, hosts: Sequence[Host]) -> str:
    for host in hosts:
        for part in check.needs:
            if part in host.missing:
                return f"{part} was not captured{f' on {host.name}' if len(hosts) > 1 else ''}: {host.missing[part]}"
    return ""


def _look(check: Check, host: Host | None, given: Given) -> Iterator[Found]:
    if host is None:
        return check.compare(given.hosts, given) if check.compare else iter(())
    return check.look(host, given) if check.look else iter(())


def _finding(check: Check, host: Host | None, found: Found) -> Finding:
    return Finding(
        id=check.id,
        severity=found.severity or check.severity,
        host=found.host or (host.name if host else ALL_HOSTS),
        rank=host.rank if host else None,
        found=found.found,
        why=found.why or check.why,
        mend=found.mend or check.mend,
        source=found.source or check.source,
    )


def _once_per_host(findings: Iterator[Finding]) -> Iterator[Finding]:
    """Ranks of one host see the same host: what they say alike is said once, by the first of them."""
    seen: set[tuple[str, str, str]] = set()
    for finding in findings:
        key = (finding.id, finding.host, finding.found)
        if key not in seen:
            seen.add(key)
            yield finding

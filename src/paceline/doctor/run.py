"""`paceline doctor`: the hosts, the job, every check, and what is tried out besides. Imports no torch unless started by
torchrun, where the ranks meet."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from paceline.doctor import snapshot
from paceline.doctor.capture import capture
from paceline.doctor.check import Finding, Given, NotChecked
from paceline.doctor.examine import Examination, examine
from paceline.doctor.host import Host
from paceline.doctor.job_facts import JobFacts
from paceline.doctor.weigh import facts_of
from paceline.job.load import Job

Say = Callable[[str], None]


def this_host(job: Job | None, *, try_out: bool = False) -> Host:
    """A snapshot of this machine with the directories and the port that a job uses."""
    if job is None:
        return capture()
    place = job.checkpoint.place(job.run_path)
    folders = {"run": job.run_path}
    if "://" not in place:
        folders["checkpoint"] = Path(place)
    if job.data.cache_dir:
        folders["cache"] = Path(job.data.cache_dir)
    return capture(folders, port=job.launch.port, write_probe=try_out)


def all_hosts(host: Host) -> list[Host] | None:
    """The snapshots of all ranks that torchrun started, on rank 0; None on the others; this one alone without torchrun."""
    if host.place is None or host.place.world_size == 1:
        return [host]
    # By its dotted name: where nothing was launched, torch is not imported.
    gathered: list[Host] | None = importlib.import_module("paceline.doctor.ranks").gather(host)
    return gathered


def read_hosts(paths: Sequence[Path]) -> tuple[list[Host], list[Finding]]:
    """Hosts of snapshot files, and a finding for each file that cannot be read; the others still are judged."""
    hosts, findings = [], []
    for path in paths:
        try:
            hosts.append(snapshot.read(path))
        except snapshot.Unreadable as error:
            findings.append(_unreadable(path, error))
    return hosts, findings


def judge(hosts: Sequence[Host], job: Job | None) -> Examination:
    """Every check on every host, with the job's numbers on them."""
    if not hosts:
        return Examination(hosts=(), checked=(), findings=(), not_checked=())
    facts: JobFacts | None = facts_of(job, hosts) if job is not None else None
    return examine(Given(hosts=tuple(hosts), job=facts))


def with_findings(
    examination: Examination, findings: Sequence[Finding], not_checked: Sequence[NotChecked] = ()
) -> Examination:
    """The same with more of them at the front."""
    return msgspec.structs.replace(
        examination,
        findings=(*findings, *examination.findings),
        not_checked=(*examination.not_checked, *not_checked),
    )


def _unreadable(path: Path, error: snapshot.Unreadable) -> Finding:
    return Finding(
        id="snapshot", severity="error", host=path.name, rank=None, found=error.message,
        why="0 checks were made on this host", mend=error.hint or "Capture it again.",
        source="paceline, docs/guide/doctor.md",
    )  # fmt: skip

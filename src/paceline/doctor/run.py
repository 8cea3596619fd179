"""`paceline doctor`: the hosts, the job, every check, and what is tried out besides. Imports no torch unless started by
torchrun, where the ranks meet."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from paceline.doctor import snapshot
from paceline.doctor.capture import capture
from paceline.doctor.check import ALL_HOSTS, Finding, Given, NotChecked
from paceline.doctor.examine import examine
from paceline.doctor.host import Host
from paceline.doctor.job_facts import JobFacts
from paceline.doctor.measure import Measured, run_trial
from paceline.doctor.smoke import try_out
from paceline.doctor.trials import trials
from paceline.doctor.weigh import facts_of
from paceline.errors import PacelineError, Unreadable
from paceline.job.load import Job

Say = Callable[[str], None]

SMOKE = "smoke"


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What doctor says: findings, what was not checked and why, how the smoke test went, what was measured."""

    hosts: tuple[str, ...] = ()
    checked: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    not_checked: tuple[NotChecked, ...] = ()
    smoke: dict[str, Any] | None = None
    measured: tuple[Measured, ...] = ()

    def document(self) -> dict[str, Any]:
        """As `--json` prints it."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields

    def with_more(
        self,
        *,
        findings: Sequence[Finding] = (),
        not_checked: Sequence[NotChecked] = (),
        smoke: dict[str, Any] | None = None,
        measured: Sequence[Measured] = (),
    ) -> Report:
        """The same with more at the end."""
        return msgspec.structs.replace(
            self,
            findings=(*self.findings, *findings),
            not_checked=(*self.not_checked, *not_checked),
            smoke=smoke or self.smoke,
            measured=(*self.measured, *measured),
        )


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
    hosts: list[Host] = []
    findings: list[Finding] = []
    for path in paths:
        try:
            host = snapshot.read(path)
            if host.name in {other.name for other in hosts}:
                # Containers of one image often share a name; a second host must not pass for the first.
                host = msgspec.structs.replace(host, name=f"{host.name} ({path.stem})")
            hosts.append(host)
        except Unreadable as error:
            findings.append(_unreadable(path, error))
    return hosts, findings


def judge(hosts: Sequence[Host], job: Job | None, findings: Sequence[Finding] = ()) -> Report:
    """Every check on every host, with the job's numbers on them; `findings` stand before what is found."""
    if not hosts:
        return Report(findings=tuple(findings))
    facts: JobFacts | None = facts_of(job, hosts) if job is not None else None
    found = examine(Given(hosts=tuple(hosts), job=facts))
    return Report(
        hosts=found.hosts, checked=found.checked, findings=(*findings, *found.findings), not_checked=found.not_checked
    )


def smoke_test(job: Job, report: Report) -> Report:
    """The report with five steps of a small version of the job; without them where the job cannot run."""
    broken = next((f for f in report.findings if f.id == "job-runs"), None)
    if broken is not None:
        left = NotChecked(id=SMOKE, host=ALL_HOSTS, reason=f"the job cannot run: {broken.found}")
        return report.with_more(not_checked=[left])
    smoke = try_out(job)
    return report.with_more(findings=[smoke.finding] if smoke.finding else [], smoke=smoke.figures)


def measured(host: Host, report: Report, say: Say) -> Report:
    """The report with the A/B of what can be measured here; a trial that fails is listed and the others are kept,
    and so are those before Ctrl-C."""
    wanted, left = trials(host)
    for trial in wanted:
        say(f"measuring {trial.name}: {trial.a.label} against {trial.b.label}")
        try:
            found = run_trial(trial)
        except PacelineError as error:
            left.append(NotChecked(id=f"measure {trial.name}", host=host.name, reason=error.message))
            continue
        except KeyboardInterrupt:
            rest = wanted[wanted.index(trial) :]
            left += [NotChecked(id=f"measure {t.name}", host=host.name, reason="interrupted by Ctrl-C") for t in rest]
            break
        report = report.with_more(measured=[found])
    return report.with_more(not_checked=left)


def _unreadable(path: Path, error: Unreadable) -> Finding:
    return Finding(
        id="snapshot", severity="error", host=path.name, rank=None, found=error.message,
        why="0 checks were made on this host", mend=error.hint or "Capture it again.",
        source="paceline, docs/guide/doctor.md",
    )  # fmt: skip

"""What a check is, what it reads and what it says. Imports no torch.

A file of `checks/` makes one `CHECK`. Adding a check is adding such a file: they are found by listing the folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import msgspec

from paceline.doctor.host import Host
from paceline.doctor.job_facts import JobFacts

Severity = Literal["error", "warning"]
"""error: the run fails, hangs or is wrong. warning: it runs slower or breaks later than it need."""

SEVERITIES: tuple[Severity, ...] = ("error", "warning")

ALL_HOSTS = "all"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is wrong.

    `found` is the evidence with its values, `why` what it costs with a figure, `mend` the command or the change that ends
    it, `source` where that is said.
    """

    id: str
    severity: Severity
    host: str
    rank: int | None
    found: str
    why: str
    mend: str
    source: str


class NotChecked(msgspec.Struct, frozen=True, kw_only=True):
    """A check that was not made on a host, and why."""

    id: str
    host: str
    reason: str


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What a check says; what is None stands as the check has it."""

    found: str
    mend: str | None = None
    why: str | None = None
    severity: Severity | None = None
    host: str | None = None
    source: str | None = None


class Skip(Exception):
    """A check cannot tell here; the text says why."""


class Given(msgspec.Struct, frozen=True, kw_only=True):
    """All that was asked about: the hosts, and the job where one was named."""

    hosts: tuple[Host, ...]
    job: JobFacts | None = None

    @property
    def several(self) -> bool:
        """Whether a job would span hosts."""
        return len({host.name for host in self.hosts}) > 1

    def local_ranks(self, host: Host) -> int:
        """Ranks on a host: what launched, else what the job asks for, else what the host has devices for."""
        launched = host.place is not None and host.place.local_world_size > 1
        if not launched and self.job is not None and self.job.local_ranks:
            return self.job.local_ranks
        return host.local_ranks()


HostLook = Callable[[Host, Given], Iterator[Found]]
GroupLook = Callable[[Sequence[Host], Given], Iterator[Found]]


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One check.

    Args:
        id: its name in findings, as the file's with dashes.
        severity: of its findings, unless one says otherwise.
        title: what is wrong when it finds something, for the table of checks.
        why: what it costs, with a figure.
        mend: what ends it.
        source: where that is said.
        needs: parts of a `Host` without which it cannot be made.
        job: it weighs a job; without one it is not made.
        gpus: it looks at GPUs; without any it is not made.
        rdma: it looks at RDMA devices; without any it is not made.
        look: judges one host.
        compare: judges all hosts together; made only where there are several.
    """

    id: str
    severity: Severity
    title: str
    why: str
    mend: str
    source: str
    needs: tuple[str, ...] = ()
    job: bool = False
    gpus: bool = False
    rdma: bool = False
    look: HostLook | None = None
    compare: GroupLook | None = None

"""How many local ranks an attempt has where the job gives a range: as asked by `control/procs`, or one fewer, without a
suspect. The global batch, the samples and their order stay; micro-batch, accumulation and layout are derived anew.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from paceline.cluster.probe import Host, probe_host
from paceline.errors import Interrupted, JobError, Preempted, Stalled
from paceline.job.load import Job
from paceline.job.resolve import Resolved, resolve_job
from paceline.run.control import PROCS, Control
from paceline.units import Procs
from paceline.workers.affinity import RankCpus
from paceline.workers.watch import GroupResult

VISIBLE = "CUDA_VISIBLE_DEVICES"
_ASKED = re.compile(r"(\d+)(?: without (\d+))?")
STALLS = 2
"""Times that one rank stalls before its device is left out."""


JobFor = Callable[[int, int], Job]
"""Of so many ranks on each of so many hosts: the job, with the layout that is planned for them."""


def resolve_range(job: Job, host: Host | None = None, job_for: JobFor | None = None) -> dict[int, Resolved]:
    """The job for every number of local ranks that it may have, the largest first, which it starts with.

    Raises:
        JobError: it contradicts itself under one of them, with the reason for each.
    """
    host = host or probe_host()
    asked, made = job.launch.procs_per_node or Procs(host.default_procs), job_for or (lambda procs, nodes: job)
    return _resolve_each(asked, "launch.procs_per_node", lambda procs: resolve_job(made(procs, 1), procs, host))


def resolve_nodes(job: Job, procs: int, host: Host, job_for: JobFor | None = None) -> dict[int, Resolved]:
    """The job for every number of hosts that it may have, each with `procs` ranks, the largest first.

    Raises:
        JobError: see `resolve_range`.
    """
    asked, made = job.launch.nodes or Procs(1), job_for or (lambda procs, nodes: job)
    return _resolve_each(
        asked, "launch.nodes",
        lambda nodes: resolve_job(made(procs, nodes), nodes * procs, host, ranks_per_host=procs), procs,
    )  # fmt: skip


def _resolve_each(
    asked: Procs, key: str, resolve: Callable[[int], Resolved], ranks_each: int = 1
) -> dict[int, Resolved]:
    found: dict[int, Resolved] = {}
    refused: dict[int, JobError] = {}
    for count in range(int(asked), asked.least - 1, -1):
        try:
            found[count] = resolve(count)
        except JobError as error:
            if asked.least == asked:
                raise
            refused[count * ranks_each] = error
    if refused:
        raise _cannot_hold(asked, key, refused, sorted(count * ranks_each for count in found))
    return found


def _cannot_hold(asked: Procs, key: str, refused: Mapping[int, JobError], hold: list[int]) -> JobError:
    lines = "".join(f"\n  {_ranks(procs)}: {error.key}: {error.message}" for procs, error in sorted(refused.items()))
    first = next(iter(refused.values()))
    fits = f"It holds {' or '.join(map(str, hold))} ranks" if hold else "It holds none of them"
    return JobError(
        f"the range {asked} has numbers of ranks that this job does not hold:{lines}",
        key=key,
        values={"range": str(asked), "refused": {str(n): e.message for n, e in refused.items()}, "hold": hold},
        hint=f"{fits}. {first.hint or 'Narrow the range.'}",
    )


class Ranks:
    """The number of ranks of the attempts of one command.

    Args:
        range_: the job by number of ranks, the first of which it starts with.
        control: where another number is asked for.
        say: told what is done with it.
        without_suspects: whether a rank that stalls again and again is left out.
        environment: of this process, for the devices that may be used.

    Attributes:
        resolved: the job as the next attempt runs it.
        environment: variables of its workers beside this process's own.
        avoided_cpus: processors that its workers are kept off.
    """

    def __init__(
        self,
        range_: Mapping[int, Resolved],
        control: Control,
        say: Callable[[str], None],
        *,
        without_suspects: bool,
        environment: Mapping[str, str],
    ) -> None:
        self.resolved = next(iter(range_.values()))
        self.environment: dict[str, str] = {}
        self.avoided_cpus: frozenset[int] = frozenset()
        self._cpus: list[RankCpus] = []
        self._range, self._control, self._say = dict(range_), control, say
        self._without_suspects = without_suspects
        self._visible = _devices(environment.get(VISIBLE), self.resolved.host)
        self._stalls: Counter[int] = Counter()
        self._wanted: tuple[int, int | None] | None = None

    @property
    def procs(self) -> int:
        return self.resolved.layout.world_size

    def started(self, cpus: Sequence[RankCpus]) -> None:
        """An attempt has started on these processors."""
        self._cpus = list(cpus)

    def asked(self) -> str | None:
        """How another number of ranks was asked for, while it is; what cannot be met is said and removed."""
        if not self._control.asked(PROCS):
            return None
        text = self._control.text(PROCS)
        found = _ASKED.fullmatch(text)
        wanted = int(found[1]) if found else None
        without = int(found[2]) if found and found[2] else None
        if wanted is not None and wanted in self._range and wanted != self.procs and self._has_devices(wanted):
            self._wanted = wanted, without
            return f"control/{PROCS} = {text}"
        if wanted == self.procs:
            why = "that many there are"
        elif len(self._range) == 1:
            why = f"the run was started with {_ranks(self.procs)} and no range, such as --procs 1:{self.procs}"
        else:
            why = f"the range is {min(self._range)}:{max(self._range)}"
        self._say(f"paceline: control/{PROCS} = {text!r} changes nothing: {why}")
        if problem := self._control.done(PROCS):
            self._say(problem)
        return None

    def resized(self, result: GroupResult) -> str | None:
        """After an attempt: whether it ended for another number of ranks, which the next one has then; the reason."""
        wanted, self._wanted = self._wanted, None
        told = result.signal is not None or result.asked is None or not result.asked.startswith(f"control/{PROCS}")
        if wanted is None or told or not isinstance(result.error, Preempted | Interrupted):
            return None
        if problem := self._control.done(PROCS):
            self._say(problem)
        procs, without = wanted
        reason = f"control/{PROCS}: {_ranks(procs)} instead of {self.procs}"
        if procs > self.procs:
            # All that there is may be needed.
            self.avoided_cpus = frozenset()
        if without is not None and procs < self.procs:
            self._leave_out(without)
            reason += f", without rank {without}"
        self.resolved = self._range[procs]
        return reason

    def without(self, result: GroupResult) -> list[str]:
        """After a failure: leave out a rank that is suspected, if the job allows it and the range has room; what to say."""
        if not self._without_suspects or not isinstance(result.error, Stalled) or self.procs - 1 not in self._range:
            return []
        at_start = result.error.key == "recovery.start_timeout"
        # Who waited in vain for another at the start is not the one to leave out.
        seen = [] if at_start or result.rank is None else [result.rank]
        ranks = list(result.error.values.get("ranks", seen))
        self._stalls.update(ranks)
        suspect = next((rank for rank in ranks if at_start or self._stalls[rank] >= STALLS), None)
        if suspect is None:
            return []
        why = "did not start" if at_start else f"stalled {self._stalls[suspect]} times"
        said = f"paceline: rank {suspect} {why}: {_ranks(self.procs - 1)} instead of {self.procs}"
        self._leave_out(suspect)
        # Ranks are numbered anew.
        self._stalls.clear()
        self.resolved = self._range[self.procs - 1]
        return [said]

    def _leave_out(self, rank: int) -> None:
        """Its device is not used any more; without one, its processors, where it had its own."""
        if rank < len(self._visible):
            del self._visible[rank]
            self.environment[VISIBLE] = ",".join(self._visible)
        elif not self._visible and rank < len(self._cpus) and self._cpus[rank].pinned:
            self.avoided_cpus |= set(self._cpus[rank].cpus)

    def _has_devices(self, procs: int) -> bool:
        return self.resolved.host.device_kind == "cpu" or procs <= len(self._visible)


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _devices(visible: str | None, host: Host) -> list[str]:
    """The accelerators that ranks get, in their order."""
    if host.device_kind == "cpu":
        return []
    if visible:
        return [name.strip() for name in visible.split(",")]
    return [str(index) for index in range(host.devices)]

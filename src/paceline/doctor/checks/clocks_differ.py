"""Clocks that are apart, measured where ranks met."""

from collections.abc import Iterator, Sequence

from paceline.doctor.check import Check, Found, Given, Skip
from paceline.doctor.host import Host
from paceline.units import format_seconds

APART_SECONDS = 0.5


def compare(hosts: Sequence[Host], given: Given) -> Iterator[Found]:
    offsets = {h.name: h.clock.offset for h in hosts if h.clock is not None and h.clock.offset is not None}
    if len(offsets) < 2:
        raise Skip("snapshots of other times: clocks are compared where torchrun starts doctor on each host")
    first, last = min(offsets, key=lambda n: offsets[n]), max(offsets, key=lambda n: offsets[n])
    apart = offsets[last] - offsets[first]
    if apart > APART_SECONDS:
        yield Found(found=f"the clock of {last} is {format_seconds(apart)} ahead of that of {first}")


CHECK = Check(
    id="clocks-differ",
    severity="warning",
    title="Clocks of hosts are apart",
    why="0.5 s is more than most steps take: who was late is told wrongly, and leases seem to have expired",
    mend="systemctl enable --now chronyd on all hosts; chronyc makestep",
    source="chrony documentation",
    needs=("clock",),
    compare=compare,
)

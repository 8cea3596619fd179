"""Processors and memory that are not alike on all hosts."""

from collections.abc import Iterator, Sequence

from paceline.doctor.check import Check, Found, Given
from paceline.doctor.differ import differences
from paceline.doctor.host import Host
from paceline.units import format_bytes

SAME = 0.1
"""Two hosts of one kind differ by what their firmware keeps."""


def compare(hosts: Sequence[Host], given: Given) -> Iterator[Found]:
    for text in differences(hosts, lambda host: str(host.cpu.usable if host.cpu else 0)):
        yield Found(found=f"the number of CPUs that the job may use is {text}", mend="ask for equal CPUs on each host")
    for text in differences(hosts, lambda host: host.cpu.model if host.cpu else ""):
        yield Found(found=f"the processor is {text}")
    sizes = [host.memory.limit or host.memory.total for host in hosts if host.memory]
    if sizes and min(sizes) < (1 - SAME) * max(sizes):
        low = next(host for host in hosts if host.memory and (host.memory.limit or host.memory.total) == min(sizes))
        yield Found(
            found=f"memory is {format_bytes(min(sizes))} on {low.name} and up to {format_bytes(max(sizes))} elsewhere",
            mend="dmidecode -t memory on it; a module may have failed",
        )


CHECK = Check(
    id="machines-differ",
    severity="warning",
    title="Processors, CPUs of the job or memory differ between hosts",
    why="all ranks wait for the slowest: a host with half the CPUs takes up to 2 times as long on them for every step",
    mend="group hosts that are alike",
    source="paceline, docs/guide/doctor.md",
    needs=("cpu", "memory"),
    compare=compare,
)

"""A control group's CPU quota below the ranks it must carry."""

from collections.abc import Iterator

from paceline.doctor.check import Check, Found, Given
from paceline.doctor.host import Host


def look(host: Host, given: Given) -> Iterator[Found]:
    if host.cpu is None or host.cpu.quota is None:
        return
    ranks, quota = given.local_ranks(host), host.cpu.quota
    if quota < min(ranks, len(host.cpu.allowed)):
        yield Found(
            found=f"the control group grants {quota:g} CPUs' worth of time, to {ranks} ranks on {len(host.cpu.allowed)} CPUs",
            mend=f"docker run --cpus {ranks}, or resources.limits.cpu: {ranks} in Kubernetes",
            why=f"each rank runs {quota / ranks:.0%} of the time and then stands still until the next 100 ms",
        )


CHECK = Check(
    id="cpu-quota",
    severity="warning",
    title="The control group grants less than one CPU per rank",
    why="a rank that has used its share stands still for the rest of each 100 ms, and all others wait for it",
    mend="raise the container's CPU limit",
    source="Linux kernel documentation, CFS bandwidth control",
    needs=("cpu",),
    look=look,
)

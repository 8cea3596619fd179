"""Automatic page migration between NUMA nodes, beside AMD GPUs."""

from collections.abc import Iterator

from paceline.doctor.check import Check, Found, Given
from paceline.doctor.host import Host


def look(host: Host, given: Given) -> Iterator[Found]:
    amd = any(gpu.vendor == "amd" for gpu in host.gpus)
    if amd and host.memory is not None and host.memory.numa_balancing and host.cpu and len(host.cpu.nodes) > 1:
        yield Found(found=f"automatic NUMA balancing is on, over {len(host.cpu.nodes)} nodes")


CHECK = Check(
    id="numa-balancing",
    severity="warning",
    title="Automatic NUMA balancing is on beside AMD GPUs",
    why="the kernel unmaps pages to see who touches them, and a GPU's page table has to follow: up to 1 fault per page",
    mend="sysctl kernel.numa_balancing=0",
    source="ROCm documentation, System optimisation",
    needs=("memory", "cpu", "gpus"),
    gpus=True,
    look=look,
)

"""GPUs and RDMA devices on one host, and nothing that joins them."""

from collections.abc import Iterator

from paceline.doctor.check import Check, Found, Given
from paceline.doctor.host import Host


def look(host: Host, given: Given) -> Iterator[Found]:
    nvidia = [gpu for gpu in host.gpus if gpu.vendor == "nvidia"]
    if nvidia and host.fabric() and host.peer_memory is False and not any(p.driver == "efa" for p in host.rdma):
        yield Found(
            found=f"{len(nvidia)} GPUs and {len(host.fabric())} RDMA ports, but neither nvidia_peermem nor a driver that "
            "exports DMA buffers is loaded"
        )


CHECK = Check(
    id="peer-memory",
    severity="warning",
    title="RDMA cannot reach GPU memory",
    why="each byte is copied through host memory: 2 more crossings of PCIe per message",
    mend="modprobe nvidia_peermem",
    source="NCCL user guide, Troubleshooting, GPU Direct RDMA",
    needs=("rdma", "gpus", "peer_memory"),
    gpus=True,
    rdma=True,
    look=look,
)

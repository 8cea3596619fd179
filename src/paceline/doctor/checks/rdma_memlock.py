"""RDMA pins memory, which the locked-memory limit counts."""

from collections.abc import Iterator

from paceline.doctor.check import Check, Found, Given
from paceline.doctor.host import Host
from paceline.units import GiB, format_bytes

ENOUGH = 64 * GiB


def look(host: Host, given: Given) -> Iterator[Found]:
    limit = host.limits.get("memlock")
    if limit is not None and 0 <= limit.soft < ENOUGH:
        yield Found(
            found=f"the locked-memory limit is {format_bytes(limit.soft)}, and there are {len(host.rdma)} RDMA ports"
        )


CHECK = Check(
    id="rdma-memlock",
    severity="error",
    title="The locked-memory limit is too low for RDMA",
    why="registering a buffer fails: NCCL needs 4 MiB and more for each channel of each peer, pinned",
    mend="ulimit -l unlimited; in containers --ulimit memlock=-1; under systemd LimitMEMLOCK=infinity",
    source="NCCL user guide, Troubleshooting, Memory issues",
    needs=("limits", "rdma"),
    rdma=True,
    look=look,
)

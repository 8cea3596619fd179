"""GPUs that are not alike on all hosts."""

from collections.abc import Iterator, Sequence

from paceline.doctor.check import Check, Found, Given
from paceline.doctor.differ import differences
from paceline.doctor.host import Host


def compare(hosts: Sequence[Host], given: Given) -> Iterator[Found]:
    for text in differences(hosts, lambda host: str(len(host.gpus))):
        yield Found(
            found=f"the number of GPUs is {text}",
            severity="error",
            mend="nvidia-smi -L on the host that differs; drain it",
        )
    for text in differences(hosts, lambda host: host.gpus[0].name if host.gpus else "none"):
        yield Found(found=f"GPU 0 is {text}")
    for text in differences(hosts, lambda host: _limit(host)):
        yield Found(found=f"the power limit of GPUs is {text}", mend="nvidia-smi -pl WATTS on the hosts that differ")


def _limit(host: Host) -> str:
    limits = {f"{gpu.power_limit:.0f} W" for gpu in host.gpus if gpu.power_limit}
    return " and ".join(sorted(limits)) or "unknown"


CHECK = Check(
    id="gpus-differ",
    severity="warning",
    title="The number, kind or power limit of GPUs differs between hosts",
    why="all ranks wait for the slowest; with 1 GPU missing on a host torchrun's equal split does not start",
    mend="group hosts that are alike",
    source="torchrun documentation, --nproc-per-node",
    needs=("gpus",),
    compare=compare,
)

"""GPU settings that keep ranks away or make every start slow."""

from collections.abc import Iterator

from paceline.doctor.check import Check, Found, Given
from paceline.doctor.host import Host


def look(host: Host, given: Given) -> Iterator[Found]:
    for gpu in host.gpus:
        name = f"GPU {gpu.index}"
        if gpu.compute_mode == "Prohibited":
            yield Found(
                found=f"{name}: compute mode Prohibited", mend=f"nvidia-smi -i {gpu.index} -c DEFAULT", severity="error"
            )
        elif gpu.compute_mode.startswith("Exclusive") and given.local_ranks(host) > len(host.gpus):
            yield Found(
                found=f"{name}: compute mode {gpu.compute_mode} and {given.local_ranks(host)} ranks on {len(host.gpus)} GPUs",
                mend=f"nvidia-smi -i {gpu.index} -c DEFAULT",
                severity="error",
            )
        if gpu.mig:
            yield Found(
                found=f"{name} is split into instances (MIG)",
                mend=f"nvidia-smi -i {gpu.index} -mig 0",
                why="NCCL has 0 direct paths between instances: no NVLink, no peer access",
            )
    off = [str(gpu.index) for gpu in host.gpus if gpu.persistence is False]
    if off and not host.virtual:
        yield Found(
            found=f"persistence mode is off on GPU {', '.join(off)}", mend="nvidia-smi -pm 1, or nvidia-persistenced"
        )


CHECK = Check(
    id="gpu-mode",
    severity="warning",
    title="Compute mode, MIG or persistence mode is set against a job",
    why="without persistence the driver is loaded anew for each first process, 1 to 3 s a GPU",
    mend="nvidia-smi -c DEFAULT; nvidia-smi -mig 0; nvidia-smi -pm 1",
    source="NVIDIA, Driver Persistence; nvidia-smi documentation",
    needs=("gpus",),
    gpus=True,
    look=look,
)

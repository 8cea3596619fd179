"""GPUs that the bus shows and the driver does not answer for."""

from collections.abc import Iterator

from paceline.doctor.check import Check, Found, Given
from paceline.doctor.host import Host


def look(host: Host, given: Given) -> Iterator[Found]:
    if host.gpu_devices > len(host.gpus):
        reason = host.missing.get("gpus")
        answer = f"the driver answers for {len(host.gpus)}" if reason is None else f"no driver answers: {reason}"
        yield Found(found=f"the PCI bus shows {host.gpu_devices} GPUs, {answer}")


CHECK = Check(
    id="gpu-driver",
    severity="error",
    title="The bus shows more GPUs than the driver",
    why="a job of one rank per GPU fails at the start with 1 GPU missing",
    mend="nvidia-smi (rocm-smi); dmesg | grep -i nvrm; restart the host, then drain it if the GPU stays away",
    source="NVIDIA, GPU Debug Guidelines",
    look=look,
)

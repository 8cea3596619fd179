"""Processes that hold GPU memory before the job has begun, and memory that nobody seems to hold."""

from collections.abc import Iterator

from paceline.doctor.check import Check, Found, Given
from paceline.doctor.host import Host
from paceline.units import GiB, format_bytes, format_seconds

IDLE = 2 * GiB
"""Driver, fabric and display hold less."""


def look(host: Host, given: Given) -> Iterator[Found]:
    numbers = {gpu.uuid: gpu.index for gpu in host.gpus}
    for process in host.processes:
        age = f", {format_seconds(process.age)} old" if process.age is not None else ""
        stale = ", its parent is gone" if process.orphan else ""
        yield Found(
            found=f"process {process.pid} ({process.name or 'unknown'}{age}{stale}) holds {format_bytes(process.memory)} of "
            f"GPU {numbers.get(process.gpu, process.gpu)}",
            mend=f"kill {process.pid}, if nobody needs it (kill -9 where that is not enough)",
            severity="error" if process.orphan else "warning",
        )
    held = {process.gpu for process in host.processes}
    for gpu in host.gpus:
        if gpu.memory_used > IDLE and gpu.uuid not in held and "processes" not in host.missing and not gpu.mig:
            yield Found(
                found=f"GPU {gpu.index}: {format_bytes(gpu.memory_used)} are in use and no process here holds them",
                mend="fuser -v /dev/nvidia*; it is another container's, or a process in an uninterruptible wait",
            )


CHECK = Check(
    id="gpu-processes",
    severity="warning",
    title="Something holds GPU memory before the job begins",
    why="the job has as much less, and 2 processes on one GPU take turns: each at about half speed",
    mend="end the process",
    source="nvidia-smi documentation, processes",
    needs=("gpus",),
    gpus=True,
    look=look,
)

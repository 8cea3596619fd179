"""Memory errors that could not be corrected, rows waiting to be remapped, and error correction that is off."""

from collections.abc import Iterator

from paceline.doctor.check import Check, Found, Given
from paceline.doctor.host import Gpu, Host

CORRECTED = 10_000


def look(host: Host, given: Given) -> Iterator[Found]:
    for gpu in host.gpus:
        yield from _gpu(gpu)


def _gpu(gpu: Gpu) -> Iterator[Found]:
    name = f"GPU {gpu.index} ({gpu.uuid or gpu.bus})"
    reset = f"drain the host, then nvidia-smi --gpu-reset -i {gpu.index}"
    if gpu.remap_failed:
        yield Found(
            found=f"{name}: a row could not be remapped, {gpu.remapped_uncorrected} are", mend="have it replaced"
        )
    elif gpu.remap_pending:
        yield Found(found=f"{name}: a row waits to be remapped until the GPU is reset", mend=reset, severity="warning")
    if gpu.uncorrected:
        yield Found(
            found=f"{name}: {gpu.uncorrected} uncorrected memory errors since the driver was loaded", mend=reset
        )
    elif gpu.corrected > CORRECTED:
        yield Found(
            found=f"{name}: {gpu.corrected} corrected memory errors since the driver was loaded", mend=reset,
            severity="warning",
        )  # fmt: skip
    if gpu.ecc is False:
        pending = "; it is on from the next reset" if gpu.ecc_pending else ""
        yield Found(
            found=f"{name}: error correction is off{pending}",
            mend=f"nvidia-smi -i {gpu.index} -e 1, then restart the host",
            severity="warning",
            why="1 flipped bit in a weight goes unseen into every checkpoint that follows",
        )


CHECK = Check(
    id="gpu-memory-errors",
    severity="error",
    title="GPU memory has uncorrected errors, unremapped rows, or no error correction",
    why="72 of the 419 interruptions of Llama 3's 54 days were GPU memory",
    mend="reset or replace the GPU",
    source="NVIDIA, GPU Memory Error Management; Llama 3 report, table 5",
    needs=("gpus",),
    gpus=True,
    look=look,
)

"""/dev/shm against what the loader's workers and NCCL put there. BL-30."""

from collections.abc import Iterator

from paceline.doctor.check import Check, Found, Given
from paceline.doctor.host import Host
from paceline.units import MiB, format_bytes

DOCKER_DEFAULT = 64 * MiB
NCCL_PER_RANK = 32 * MiB
"""Buffers of 8 channels, 4 MiB each (NCCL_BUFFSIZE)."""


def look(host: Host, given: Given) -> Iterator[Found]:
    folder, ranks, job = host.folder("shm"), given.local_ranks(host), given.job
    if folder is None:
        yield Found(found="/dev/shm is not mounted", mend="mount -t tmpfs tmpfs /dev/shm")
        return
    loader = job.shared_memory * ranks if job is not None else 0
    need = loader + (NCCL_PER_RANK * ranks if len(host.gpus) > 1 and ranks > 1 else 0)
    size = _rounded(max(need * 2, 1024 * MiB))
    mend = f"docker run --shm-size={size // MiB}m, or an emptyDir of medium Memory in Kubernetes"
    if need > folder.free:
        yield Found(
            found=f"/dev/shm has {format_bytes(folder.free)} free of {format_bytes(folder.size)}; {ranks} ranks need "
            f"{format_bytes(need)}" + (f" with {job.loader_workers} loader processes each" if job and loader else ""),
            mend=mend,
        )
    elif folder.size <= DOCKER_DEFAULT and ranks > 1 and host.gpus:
        yield Found(
            found=f"/dev/shm has {format_bytes(folder.size)}, docker's default, for {ranks} ranks", mend=mend,
            severity="warning",
        )  # fmt: skip


def _rounded(size: int) -> int:
    return -(-size // (256 * MiB)) * 256 * MiB


CHECK = Check(
    id="shared-memory",
    severity="error",
    title="/dev/shm is smaller than the loader's and NCCL's need",
    why="docker gives 64 MiB: NCCL fails at the start, torch's own loaders die by a bus error, paceline's go through "
    "a pipe, which is slower",
    mend="docker run --shm-size=1g",
    source="NCCL user guide, Troubleshooting, Shared memory; pytorch issues 5040 and 1355",
    needs=("folders",),
    look=look,
)

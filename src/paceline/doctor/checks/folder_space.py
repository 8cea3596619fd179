"""Space and inodes where checkpoints, runs and shards are written."""

from collections.abc import Iterator

from paceline.doctor.check import Check, Found, Given
from paceline.doctor.host import Folder, Host
from paceline.units import GiB, format_bytes

ROLES = ("run", "checkpoint", "cache", "tmp")
FULL = 0.95
LEAST = 1 * GiB
INODES = 1000


def look(host: Host, given: Given) -> Iterator[Found]:
    seen: set[tuple[int, int]] = set()
    for folder in host.folders:
        if folder.role not in ROLES or (folder.size, folder.free) in seen:
            continue
        seen.add((folder.size, folder.free))
        yield from _space(folder, given)
        if folder.inodes and folder.inodes_free < INODES:
            yield Found(
                found=f"{folder.path} ({folder.role}) has {folder.inodes_free} of {folder.inodes} inodes left",
                mend=f"df -i {folder.path}; remove small files, such as old caches",
                severity="error",
            )


def _space(folder: Folder, given: Given) -> Iterator[Found]:
    job = given.job
    if folder.role in ("run", "checkpoint") and job is not None and job.checkpoint:
        need = job.checkpoint * (job.keep + 1)
        if folder.free < need and (folder.role == "checkpoint" or job.checkpoint_place.startswith(folder.path)):
            yield Found(
                found=f"{folder.path} has {format_bytes(folder.free)} free; {job.keep} checkpoints and the one being written "
                f"are {format_bytes(need)}",
                mend=f"free space, set checkpoint.dir to another file system, or checkpoint.keep={max(1, job.keep - 1)}",
                severity="error" if folder.free < 2 * job.checkpoint else "warning",
            )
            return
    if folder.size and folder.free < LEAST and folder.free < (1 - FULL) * folder.size:
        yield Found(
            found=f"{folder.path} ({folder.role}) has {format_bytes(folder.free)} of {format_bytes(folder.size)} free",
            mend=f"du -xh --max-depth 2 {folder.path} | sort -h | tail",
        )


CHECK = Check(
    id="folder-space",
    severity="warning",
    title="A file system that the job writes to is full, in bytes or inodes",
    why="a save fails and the run goes on without; some parallel file systems slow down or fail from 80% on",
    mend="free space",
    source="Stas Bekman, Machine Learning Engineering, storage",
    needs=("folders",),
    look=look,
)

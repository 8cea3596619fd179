"""Where the optimizer's moments are kept. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from paceline.errors import JobError
from paceline.parallel.config import ParallelSection

Place = Literal["none", "host", "disk"]

MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs"})


class OffloadConfig(msgspec.Struct, frozen=True):
    """`place` of the moments; `folder` of each rank's file where it is the disk."""

    place: Place = "none"
    folder: Path | None = None


NO_OFFLOAD = OffloadConfig()


def offload_config(parallel: ParallelSection, device_kind: str, run_path: Path) -> OffloadConfig:
    """Where `[parallel]` wants the moments; without a folder of its own, the disk is that of the run directory.

    Raises:
        JobError: the place is the memory that the moments are in anyway.
    """
    if parallel.offload == "host" and device_kind == "cpu":
        raise JobError(
            "host has no effect where ranks run on the processor: its memory holds the moments already",
            key="parallel.offload",
            values={"offload": "host", "device_kind": device_kind},
            hint="Set parallel.offload=disk to keep them in a memory-mapped file, or remove it.",
        )
    if parallel.offload != "disk":
        return OffloadConfig(parallel.offload)
    folder = Path(parallel.offload_dir) if parallel.offload_dir else run_path
    kind = file_system_of(folder)
    if kind in MEMORY_FILE_SYSTEMS:
        raise JobError(
            f"disk has no effect in {folder}, which is a {kind}: its files are memory",
            key="parallel.offload_dir",
            values={"folder": str(folder), "file_system": kind},
            hint="Set parallel.offload_dir to a folder on a local disk.",
        )
    return OffloadConfig("disk", folder)


def file_system_of(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> str | None:
    """Type of the file system that a folder, there or still to be made, belongs to; None where the system does not say."""
    try:
        lines = mounts.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    target = folder.resolve()
    found: tuple[int, str] | None = None
    for line in lines:
        _, point, kind, *_ = line.split(" ")
        # The later of two mounts on one point covers the other.
        if target.is_relative_to(point) and (found is None or len(point) >= found[0]):
            found = len(point), kind
    return found[1] if found else None

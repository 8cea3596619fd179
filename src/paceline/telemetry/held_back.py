"""For how long a CPU quota has held a rank back, from the kernel's account of its control group. No torch.

Under a quota a group runs for a part of each period (100 ms unless set) and then stands still. Where that falls into an
exchange, the other ranks wait for it, and it seems to wait for them: no clock of the rank's own tells the two apart.

Source: Linux, Documentation/admin-guide/cgroup-v2.rst (`cpu.stat`: throttled_usec) and scheduler/sched-bwc.rst (version 1:
throttled_time, in nanoseconds); both are summed over the processors that the group ran on.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from paceline.workers.affinity import quota_folders

_UNITS = {"throttled_usec": 1e-6, "throttled_time": 1e-9}


class HeldBack:
    """Of this rank alone: of groups that it shares with other ranks of its host nothing is known of each.

    Args:
        threads: how many of this process's threads run at a time, at most.
        alone: whether it is the only rank of its host.
        root, membership, others: where the kernel tells; `others`: of a process beside all ranks.
    """

    def __init__(
        self,
        threads: int,
        *,
        alone: bool,
        root: Path = Path("/sys/fs/cgroup"),
        membership: Path = Path("/proc/self/cgroup"),
        others: Path | None = None,
    ) -> None:
        self._threads = max(1, threads)
        self._root, self._membership = root, membership
        self._others = None if alone else others or Path(f"/proc/{os.getppid()}/cgroup")
        self._member_of: bytes | None = None
        self._folders: list[Path] = []
        self._before = self._now()

    def since_last(self) -> float | None:
        """Seconds since the last call; None where no quota holds this rank, or another one than before does."""
        before, self._before = self._before, self._now()
        if before is None or self._before is None or before[0] != self._before[0]:
            return None
        return max(0.0, self._before[1] - before[1]) / self._threads

    def _now(self) -> tuple[list[Path], float] | None:
        """The groups, and the seconds of the one that was held back longest."""
        try:
            member_of = self._membership.read_bytes()
        except OSError:
            return None
        if member_of != self._member_of:
            self._member_of = member_of
            self._folders = quota_folders(self._root, self._membership, self._others)
        held = [seconds for folder in self._folders if (seconds := _seconds(folder)) is not None]
        return (self._folders, max(held)) if held else None


def _seconds(folder: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError):
        for line in (folder / "cpu.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name in _UNITS:
                return int(value) * _UNITS[name]
    return None

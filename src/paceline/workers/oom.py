"""Whether the kernel killed a process of this cgroup for memory."""

from __future__ import annotations

from pathlib import Path


def oom_kills(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int | None:
    """How often the kernel has killed for memory in this process's cgroup so far; None where it does not count."""
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except (OSError, ValueError):
        return None
    for _, controllers, path in lines:
        if controllers == "":
            file = root / path.lstrip("/") / "memory.events"
        elif controllers == "memory":
            file = root / "memory" / path.lstrip("/") / "memory.oom_control"
        else:
            continue
        count = _field(file, "oom_kill")
        if count is not None:
            return count
    return None


def _field(file: Path, name: str) -> int | None:
    try:
        fields = dict(line.split() for line in file.read_text().splitlines())
        return int(fields[name])
    except (OSError, ValueError, KeyError):
        return None

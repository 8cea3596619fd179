"""What can be tried on this machine: shaped links and CPU quotas need root and a kernel that has them."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from paceline.drill.faults import Fault

CGROUPS = Path("/sys/fs/cgroup")
PERIOD_US = 100_000
CPU_SHARE = 0.25
"""Of one CPU, for the slow rank: half of one is what each rank has anyway where a machine does something else besides."""
LINK = "rate 200mbit burst 256kb latency 50ms"
"""Of the slow link: what a gigabyte per second of loopback falls to."""


def why_not(fault: Fault, procs: int) -> str | None:
    """Why a fault cannot be tried here with so many ranks; None where it can."""
    if procs < fault.ranks:
        return f"needs {fault.ranks} ranks or more; this drill has {procs}"
    if fault.kind == "slow-cpu":
        return _no_quota()
    return _no_shaping() if fault.kind == "slow-link" else None


@contextlib.contextmanager
def little_cpu(name: str) -> Iterator[str]:
    """A control group that may use `CPU_SHARE` of a CPU; gives the file that takes the process ids of its members."""
    group, write_quota = _group(name)
    group.mkdir()
    try:
        write_quota(group, round(CPU_SHARE * PERIOD_US))
        yield str(group / "cgroup.procs")
    finally:
        _remove(group)


@contextlib.contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[str]:
    """A file system of that size at `folder`, where this user may mount one and memory is plenty; gives its path, or "".

    It is gone afterwards, with what is in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not _may_mount(size_bytes):
        yield ""
        return
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=0700", "paceline-drill", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        yield ""
        return
    try:
        yield str(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], capture_output=True, check=False)


def _may_mount(size_bytes: int) -> bool:
    if os.geteuid() != 0 or shutil.which("mount") is None:
        return False
    return size_bytes < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") // 8


@functools.cache
def _no_quota() -> str | None:
    if os.geteuid() != 0:
        return "needs root for a CPU quota"
    try:
        with little_cpu(f"paceline-drill-probe-{os.getpid()}"):
            return None
    except OSError as error:
        return f"no CPU quota can be set here: {error.strerror or error}"


def _group(name: str):  # type: ignore[no-untyped-def]
    """The folder of a new control group, and what writes its quota: of the first version, or of the second."""
    first = CGROUPS / "cpu"
    if (first / "cpu.cfs_quota_us").exists():
        return first / name, _write_first
    return CGROUPS / name, _write_second


def _write_first(group: Path, quota_us: int) -> None:
    (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
    (group / "cpu.cfs_quota_us").write_text(str(quota_us))


def _write_second(group: Path, quota_us: int) -> None:
    (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")


def _remove(group: Path) -> None:
    """Its members are gone, but for what the kernel has not yet cleared away."""
    for _ in range(100):
        try:
            group.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            subprocess.run(["sleep", "0.02"], check=False)
        else:
            return


@functools.cache
def _no_shaping() -> str | None:
    if os.geteuid() != 0:
        return "needs root for a network of its own with a shaped link"
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)} for a shaped link"
    command = ["unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", "tbf", *LINK.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    return f"no link can be shaped here: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else 'tc failed'}"

"""Processors and memory, from /proc and /sys."""

from __future__ import annotations

import os
import time
from pathlib import Path

from paceline.cluster.probe import BF16_FLAGS, FP16_FLAGS, memory_limit_bytes
from paceline.doctor.capture import files
from paceline.doctor.host import Cpu, Memory
from paceline.workers import affinity, oom

CPUS = Path("/sys/devices/system/cpu")
NODES = Path("/sys/devices/system/node")
CGROUP = Path("/sys/fs/cgroup")
SAMPLE_SECONDS = 0.25


def cpu() -> Cpu:
    """Sockets, NUMA nodes, what this process may use of them, and how busy they are."""
    allowed = affinity.allowed_cpus()
    online = tuple(affinity.parse_cpu_list(files.text(CPUS / "online") or f"0-{(os.cpu_count() or 1) - 1}"))
    flags = next(
        (set(line.partition(":")[2].split()) for line in _cpuinfo() if line.startswith(("flags", "Features"))), set()
    )
    siblings = files.text(CPUS / f"cpu{online[0]}/topology/thread_siblings_list", "0")
    return Cpu(
        model=next((line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")), ""),
        online=online,
        allowed=allowed,
        quota=affinity.cpu_quota(),
        sockets=_sockets(online),
        nodes=_nodes(),
        threads_per_core=len(affinity.parse_cpu_list(siblings)),
        bf16=bool(flags.intersection(BF16_FLAGS)),
        fp16=bool(flags.intersection(FP16_FLAGS)),
        governor=_governor(online[0]),
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        busy=_busy(),
    )


def memory() -> Memory:
    """Of the machine and of this process's control group."""
    table = dict(_meminfo())
    total = table.get("MemTotal", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    limit = memory_limit_bytes()
    return Memory(
        total=total,
        available=table.get("MemAvailable", total),
        swap_used=table.get("SwapTotal", 0) - table.get("SwapFree", 0),
        limit=limit if limit < total else None,
        limit_used=_limit_used(),
        oom_kills=oom.oom_kills() or 0,
        numa_balancing=files.text("/proc/sys/kernel/numa_balancing", "0") not in ("0", ""),
    )


def _busy() -> float | None:
    """Share of all CPUs' time that is used during `SAMPLE_SECONDS`."""
    before = _ticks()
    time.sleep(SAMPLE_SECONDS)
    after = _ticks()
    total = sum(after) - sum(before)
    # Columns four and five: idle, and waiting for a disk.
    return 1 - (sum(after[3:5]) - sum(before[3:5])) / total if total > 0 else None


def _ticks() -> list[int]:
    head = files.text("/proc/stat").partition("\n")[0].split()[1:9]
    return [int(text) for text in head]


def _limit_used() -> int | None:
    """Bytes that count against the control group's limit, less what the kernel gives back by itself."""
    for used, stat, key in (
        (CGROUP / "memory.current", CGROUP / "memory.stat", "inactive_file"),
        (CGROUP / "memory/memory.usage_in_bytes", CGROUP / "memory/memory.stat", "total_inactive_file"),
    ):
        size = files.number(used)
        if size is not None:
            rows = dict(line.split()[:2] for line in files.text(stat).splitlines() if len(line.split()) >= 2)
            return max(0, size - int(rows.get(key, 0)))
    return None


def _meminfo() -> list[tuple[str, int]]:
    rows = [line.split() for line in files.text("/proc/meminfo").splitlines()]
    return [(row[0].rstrip(":"), int(row[1]) * 1024) for row in rows if len(row) >= 2]


def _cpuinfo() -> list[str]:
    return files.text("/proc/cpuinfo").splitlines()


def _sockets(online: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    found: dict[str, list[int]] = {}
    for number in online:
        package = files.text(CPUS / f"cpu{number}/topology/physical_package_id", "0")
        found.setdefault(package, []).append(number)
    return {name: tuple(cpus) for name, cpus in found.items()}


def _nodes() -> dict[str, tuple[int, ...]]:
    listed = {n.name[4:]: files.text(n / "cpulist") for n in files.folders(NODES) if n.name[4:].isdigit()}
    return {name: tuple(affinity.parse_cpu_list(text)) for name, text in listed.items() if text}


def _governor(number: int) -> str:
    folder = CPUS / f"cpu{number}/cpufreq"
    governor, driver = files.text(folder / "scaling_governor"), files.text(folder / "scaling_driver")
    return f"{governor} ({driver})" if governor else ""

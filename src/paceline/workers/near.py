"""CPUs near the device of each local rank, as the kernel lists them. Standard library only: asked before torch is there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from paceline.workers.affinity import parse_cpu_list

DRIVERS = (Path("/proc/driver/nvidia/gpus"), Path("/sys/bus/pci/drivers/amdgpu"))
"""Folders that hold an entry per GPU, named by its address on the PCI bus; CUDA and ROCm count GPUs in that order."""

PCI = Path("/sys/bus/pci/devices")
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def device_cpus(
    ranks: int, env: Mapping[str, str] | None = None, drivers: tuple[Path, ...] = DRIVERS, pci: Path = PCI
) -> list[tuple[int, ...]]:
    """Of each local rank the CPUs on the NUMA node of its device: local rank n has the n-th visible GPU.

    Nothing where there are fewer GPUs than ranks, where they are named otherwise than by number, or where the kernel does
    not say what is near them.
    """
    addresses = _visible(_addresses(drivers), os.environ if env is None else env)
    if addresses is None or len(addresses) < ranks:
        return []
    near = [_cpus(pci / address) for address in addresses[:ranks]]
    return near if all(near) else []


def _addresses(drivers: tuple[Path, ...]) -> list[str]:
    for folder in drivers:
        try:
            found = sorted(entry.name for entry in folder.iterdir() if entry.name.count(":") == 2)
        except OSError:
            continue
        if found:
            return found
    return []


def _visible(addresses: list[str], env: Mapping[str, str]) -> list[str] | None:
    """The addresses that the variables leave, in their order; None where they name devices otherwise than by number."""
    for name in VISIBLE:
        if name not in env:
            continue
        words = [word.strip() for word in env[name].split(",")]
        if not all(word.isdigit() and int(word) < len(addresses) for word in words):
            return None
        addresses = [addresses[int(word)] for word in words]
    return addresses


def _cpus(device: Path) -> tuple[int, ...]:
    try:
        text = (device / "local_cpulist").read_text().strip()
    except OSError:
        return ()
    return tuple(parse_cpu_list(text)) if text else ()

"""AMD GPUs as their kernel driver lists them in /sys; no tool is needed."""

from __future__ import annotations

import re
from pathlib import Path

from paceline.doctor.capture import files
from paceline.doctor.host import Gpu
from paceline.workers.affinity import parse_cpu_list

CARDS = Path("/sys/class/drm")
VENDOR = "0x1002"


def gpus() -> tuple[Gpu, ...]:
    """AMD GPUs with memory of their own, in the order of the bus.

    Raises:
        NotThere: the amdgpu driver is not loaded.
    """
    if not Path("/sys/module/amdgpu").exists():
        raise files.NotThere("the amdgpu driver is not loaded")
    cards = [card / "device" for card in files.folders(CARDS) if re.fullmatch(r"card\d+", card.name)]
    devices = sorted(
        {d.resolve() for d in cards if files.text(d / "vendor") == VENDOR and (d / "mem_info_vram_total").exists()}
    )
    return tuple(_gpu(index, device) for index, device in enumerate(devices))


def _gpu(index: int, device: Path) -> Gpu:
    width, width_max = (files.number(device / f"{end}_link_width") for end in ("current", "max"))
    node = files.number(device / "numa_node")
    cpus = files.text(device / "local_cpulist")
    return Gpu(
        index=index,
        name=files.text(device / "product_name") or f"AMD {files.text(device / 'device')}",
        uuid=files.text(device / "unique_id"),
        vendor="amd",
        bus=device.name,
        memory=files.number(device / "mem_info_vram_total") or 0,
        memory_used=files.number(device / "mem_info_vram_used") or 0,
        utilisation=files.number(device / "gpu_busy_percent"),
        uncorrected=_uncorrected(device),
        pcie_width=width,
        pcie_width_max=width_max,
        node=node if node is not None and node >= 0 else None,
        cpus=tuple(parse_cpu_list(cpus)) if cpus else (),
    )


def _uncorrected(device: Path) -> int:
    """Uncorrected errors of all parts: `ue: 2` in each file of `ras`."""
    found = 0
    for file in files.folders(device / "ras"):
        match = re.search(r"^ue: (\d+)", files.text(file), re.M)
        found += int(match[1]) if match else 0
    return found

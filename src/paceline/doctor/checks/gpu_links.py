"""NVLinks that are down, and PCIe links that are narrower than they could be."""

from collections.abc import Iterator

from paceline.doctor.check import Check, Found, Given
from paceline.doctor.host import Host
from paceline.units import format_bandwidth

BUSY = 50


def look(host: Host, given: Given) -> Iterator[Found]:
    most = max((g.nvlink.active for g in host.gpus if g.nvlink), default=0)
    for gpu in host.gpus:
        name = f"GPU {gpu.index} ({gpu.uuid or gpu.bus})"
        link = gpu.nvlink
        if gpu.fabric and gpu.fabric != "Completed":
            yield Found(
                found=f"{name}: the NVSwitch fabric is {gpu.fabric}",
                mend="systemctl status nvidia-fabricmanager; it must have the driver's version; restart it",
                why="until it is Completed CUDA does not start on any of the host's GPUs: 0 ranks run",
                severity="error",
                source="NVIDIA, Fabric Manager user guide",
            )
        if most and (link is None or link.active < max(most, link.links)):
            active = link.active if link else 0
            rate = f" of {format_bandwidth(link.rate)}" if link and link.rate else ""
            yield Found(
                found=f"{name}: {active} of {max(most, link.links if link else 0)} NVLinks{rate} are up",
                mend=f"nvidia-smi nvlink -s -i {gpu.index}; restart nvidia-fabricmanager; reset the GPU",
                severity="error",
            )
        width, widest = gpu.pcie_width, gpu.pcie_width_max
        if width and widest and width < widest and not host.virtual:
            yield Found(
                found=f"{name}: PCIe x{width}, it can x{widest}", why=f"copies take {widest / width:g} times as long"
            )
        speed, fastest = gpu.pcie_generation, gpu.pcie_generation_max
        if speed and fastest and speed < fastest and (gpu.utilisation or 0) >= BUSY:
            yield Found(
                found=f"{name}: PCIe generation {speed} under load, it can {fastest}",
                why=f"copies take {2 ** (fastest - speed)} times as long",
            )


CHECK = Check(
    id="gpu-links",
    severity="warning",
    title="NVLinks or their switches are down, or a PCIe link is narrow",
    why="rings go as fast as their narrowest link: with 17 of 18 up, all 8 GPUs lose 1 in 18",
    mend="reseat the board; restart the host",
    source="nvidia-smi documentation, nvlink and PCIe link information",
    needs=("gpus",),
    gpus=True,
    look=look,
)

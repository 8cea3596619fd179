"""GPUs: what the vendor's tool and the kernel say of them. `nvidia-smi` is asked once for all, as XML."""

from __future__ import annotations

import contextlib
import os
import re
import time
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

from paceline.doctor.capture import amd, files
from paceline.doctor.host import Gpu, NvLink, Process, Xid
from paceline.workers.affinity import parse_cpu_list

SMI_SECONDS = 8.0
PCI = Path("/sys/bus/pci/devices")
GPU_VENDORS = {"0x10de": "nvidia", "0x1002": "amd"}
GPU_CLASSES = ("0x0300", "0x0302", "0x1200")
"""Display, 3D and processing accelerators."""

THROTTLE = {
    "hw_thermal_slowdown": "thermal, hardware",
    "sw_thermal_slowdown": "thermal, driver",
    "hw_power_brake_slowdown": "power brake",
    "hw_slowdown": "hardware slowdown",
    "sw_power_cap": "power limit",
}


def on_the_bus() -> int:
    """GPUs that the PCI bus shows, with or without a driver."""
    return len(_pci_gpus())


def gpus() -> tuple[Gpu, ...]:
    """All GPUs of this machine; none where the bus shows none.

    Raises:
        NotThere: the bus shows GPUs, and the vendor's tool does not answer for them.
    """
    vendors = {vendor for _, vendor in _pci_gpus()}
    if "nvidia" in vendors or _asked():
        nodes = _log().findall("gpu")
        links = _nvlinks()
        return tuple(_gpu(number, node, links) for number, node in enumerate(nodes))
    return amd.gpus() if "amd" in vendors else ()


def _asked() -> bool:
    """Whether there is a driver whose tool can be asked."""
    return Path("/dev/nvidiactl").exists()


def _pci_gpus() -> list[tuple[str, str]]:
    found = []
    for device in files.folders(PCI):
        vendor = GPU_VENDORS.get(files.text(device / "vendor"))
        if vendor and files.text(device / "class").startswith(GPU_CLASSES):
            found.append((device.name, vendor))
    return found


def _log() -> ElementTree.Element:
    """The driver's own report, asked for once: a driver that hangs would hold each probe for as long. Raises NotThere."""
    found = _report()
    if isinstance(found, str):
        raise files.NotThere(found)
    return found


@cache
def _report() -> ElementTree.Element | str:
    """The report, or why there is none."""
    try:
        return ElementTree.fromstring(files.printed(["nvidia-smi", "-q", "-x"], SMI_SECONDS))
    except files.NotThere as error:
        return str(error)
    except ElementTree.ParseError as error:
        return f"nvidia-smi -q -x is no XML: {error}"


def _gpu(index: int, node: ElementTree.Element, links: dict[int, NvLink]) -> Gpu:
    bus = short_bus(node.get("id", ""))
    memory = node.find("ecc_errors/volatile")
    width, width_max = (
        _figure(node, f"pci/pci_gpu_link_info/link_widths/{end}_link_width") for end in ("current", "max")
    )
    generation = _figure(node, "pci/pci_gpu_link_info/pcie_gen/current_link_gen")
    generation_max = _figure(node, "pci/pci_gpu_link_info/pcie_gen/max_link_gen")
    return Gpu(
        index=index,
        name=_text(node, "product_name"),
        uuid=_text(node, "uuid"),
        bus=bus,
        memory=_mebibytes(node, "fb_memory_usage/total"),
        memory_used=_mebibytes(node, "fb_memory_usage/used"),
        clock=_figure(node, "clocks/sm_clock"),
        clock_max=_figure(node, "max_clocks/sm_clock"),
        clock_set=_figure(node, "applications_clocks/graphics_clock"),
        clock_default=_figure(node, "default_applications_clocks/graphics_clock"),
        utilisation=_figure(node, "utilization/gpu_util"),
        throttle=_throttle(node),
        temperature=_figure(node, "temperature/gpu_temp"),
        temperature_slow=_figure(node, "temperature/gpu_temp_slow_threshold"),
        power_limit=_power(node, "current_power_limit") or _power(node, "power_limit"),
        power_default=_power(node, "default_power_limit"),
        persistence=_switch(_text(node, "persistence_mode")),
        compute_mode=_text(node, "compute_mode") or "Default",
        mig=_text(node, "mig_mode/current_mig") == "Enabled",
        ecc=_switch(_text(node, "ecc_mode/current_ecc")),
        ecc_pending=_switch(_text(node, "ecc_mode/pending_ecc")),
        uncorrected=_errors(memory, "uncorrectable"),
        corrected=_errors(memory, "correctable"),
        remapped_uncorrected=int(_figure(node, "remapped_rows/remapped_row_unc") or 0),
        remap_pending=_text(node, "remapped_rows/remapped_row_pending") == "Yes",
        remap_failed=_text(node, "remapped_rows/remapped_row_failure") == "Yes",
        pcie_generation=int(generation) if generation else None,
        pcie_generation_max=int(generation_max) if generation_max else None,
        pcie_width=int(width) if width else None,
        pcie_width_max=int(width_max) if width_max else None,
        replays=int(_figure(node, "pci/replay_counter") or 0),
        nvlink=links.get(index),
        fabric=_text(node, "fabric/state"),
        node=node_of(bus),
        cpus=cpus_of(bus),
    )


def node_of(bus: str) -> int | None:
    """NUMA node of a PCI device, where the kernel says."""
    number = files.number(PCI / bus / "numa_node")
    return number if number is not None and number >= 0 else None


def cpus_of(bus: str) -> tuple[int, ...]:
    """CPUs near a PCI device, where the kernel says."""
    cpus = files.text(PCI / bus / "local_cpulist")
    return tuple(parse_cpu_list(cpus)) if cpus else ()


def short_bus(text: str) -> str:
    """The kernel's `0000:07:00.0` of the driver's `00000000:07:00.0`."""
    return re.sub(r"^0{4}(?=[0-9a-f]{4}:)", "", text.strip().lower())


def _text(node: ElementTree.Element, path: str) -> str:
    found = (node.findtext(path) or "").strip()
    return "" if found in ("N/A", "[N/A]", "Unknown Error") else found


def _figure(node: ElementTree.Element, path: str) -> float | None:
    match = re.match(r"-?[0-9.]+", _text(node, path))
    return float(match[0]) if match else None


def _mebibytes(node: ElementTree.Element, path: str) -> int:
    return int((_figure(node, path) or 0) * 2**20)


def _power(node: ElementTree.Element, name: str) -> float | None:
    found = _figure(node, f"gpu_power_readings/{name}")
    return found if found is not None else _figure(node, f"power_readings/{name}")


def _switch(text: str) -> bool | None:
    return {"Enabled": True, "Disabled": False}.get(text)


def _throttle(node: ElementTree.Element) -> tuple[str, ...]:
    """Why clocks are below what they could be; idle and the user's own settings are none of it."""
    for group, stem in (
        ("clocks_event_reasons", "clocks_event_reason_"),
        ("clocks_throttle_reasons", "clocks_throttle_reason_"),
    ):
        if node.find(group) is not None:
            return tuple(text for key, text in THROTTLE.items() if _text(node, f"{group}/{stem}{key}") == "Active")
    return ()


def _errors(node: ElementTree.Element | None, kind: str) -> int:
    if node is None:
        return 0
    counts = [c.text or "" for c in node if kind in c.tag.split("_")]
    return sum(int(text) for text in counts if text.strip().isdigit())


def _nvlinks() -> dict[int, NvLink]:
    """Links by GPU; none where the tool knows none."""
    with contextlib.suppress(files.NotThere):
        return parse_nvlinks(files.printed(["nvidia-smi", "nvlink", "-s"], SMI_SECONDS))
    return {}


def parse_nvlinks(text: str) -> dict[int, NvLink]:
    """Links by GPU of what `nvidia-smi nvlink -s` prints."""
    found: dict[int, NvLink] = {}
    gpu = -1
    for line in text.splitlines():
        if match := re.match(r"GPU (\d+):", line):
            gpu = int(match[1])
        elif match := re.match(r"\s*Link \d+:\s*(.*)", line):
            rate = re.match(r"([0-9.]+) GB/s", match[1])
            before = found.get(gpu, NvLink(0, 0))
            speed = float(rate[1]) * 1e9 if rate else 0.0
            found[gpu] = NvLink(before.links + 1, before.active + bool(rate), speed or before.rate)
    return found


def topology() -> dict[str, dict[str, str]]:
    """Paths between GPUs and network cards as `nvidia-smi topo -m` draws them; nothing without two devices.

    Raises:
        NotThere: the tool does not answer.
    """
    if not _asked():
        return {}
    _log()
    return parse_topology(files.printed(["nvidia-smi", "topo", "-m"], SMI_SECONDS))


def parse_topology(text: str) -> dict[str, dict[str, str]]:
    """The matrix of `nvidia-smi topo -m` as a table of tables."""
    rows = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in text.splitlines()]
    head = next((row for row in rows if row and row[0] == "GPU0"), [])
    columns = [name for name in head if re.fullmatch(r"(GPU|NIC)\d+", name)]
    found = {}
    for row in rows:
        if row and row is not head and re.fullmatch(r"(GPU|NIC)\d+", row[0]) and len(row) > len(columns):
            found[row[0]] = {name: path for name, path in zip(columns, row[1:], strict=False) if path != "X"}
    return found


def processes() -> tuple[Process, ...]:
    """Processes that compute on a GPU, this one and its parent left out."""
    if not _asked():
        return ()
    own = {os.getpid(), os.getppid()}
    found = []
    for gpu in _log().findall("gpu"):
        for entry in gpu.findall("processes/process_info"):
            digits = _text(entry, "pid")
            # G alone is a display's: windows hold memory on every desktop.
            if digits.isdigit() and int(digits) not in own and "C" in _text(entry, "type"):
                found.append(_process(int(digits), _text(gpu, "uuid"), entry))
    return tuple(found)


def _process(pid: int, gpu: str, entry: ElementTree.Element) -> Process:
    fields = files.text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    age = None
    if len(fields) > 19:
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return Process(
        pid=pid, gpu=gpu, name=_program(_text(entry, "process_name")), memory=_mebibytes(entry, "used_memory"), age=age,
        orphan=bool(fields) and fields[1] == "1",
    )  # fmt: skip


def _program(command: str) -> str:
    """The program's own name: arguments may hold what is nobody's business."""
    return Path(command.split()[0]).name if command.split() else ""


def xids() -> tuple[Xid, ...]:
    """Errors that the NVIDIA driver has written to the kernel log since the machine started.

    Raises:
        NotThere: the log cannot be read.
    """
    if not files.text("/proc/driver/nvidia/version"):
        return ()
    return parse_xids(files.printed(["dmesg"]))


def parse_xids(text: str) -> tuple[Xid, ...]:
    """Xids in lines of the kernel log: `NVRM: Xid (PCI:0000:07:00): 79, pid=..., GPU has fallen off the bus.`"""
    found = re.findall(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+),? ?(.*)", text)
    return tuple(Xid(int(number), bus.lower(), rest.strip()) for bus, number, rest in found)

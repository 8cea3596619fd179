"""What this host is, read from the operating system. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

BF16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")
"""Processor flags that say bf16 products have instructions of their own (x86, Arm)."""

FP16_FLAGS = ("avx512_fp16", "amx_fp16", "asimdhp")
"""Processor flags that say fp16 numbers are computed with, and not only stored."""


class Host(msgspec.Struct, frozen=True):
    """A machine as the operating system describes it.

    `devices` counts accelerators; 0 means that ranks run on the processor. Memory in bytes.
    """

    name: str
    device_kind: str
    devices: int
    device_name: str
    device_memory_bytes: int
    cores: int
    memory_bytes: int
    fast_bf16: bool
    compiler: str | None
    fp16: bool = True

    @property
    def default_procs(self) -> int:
        """One rank per accelerator; without any, 2 (1 where there is one core)."""
        return self.devices or min(2, self.cores)


def probe_host() -> Host:
    """This host. CUDA devices are asked of `nvidia-smi`, which answers without torch."""
    gpus = _nvidia_gpus()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = memory_limit_bytes()
    name, device_memory, fast_bf16 = gpus[0] if gpus else (_processor_name(), memory, _cpu_has_bf16())
    return Host(
        name=os.uname().nodename,
        device_kind="cuda" if gpus else "cpu",
        devices=len(gpus),
        device_name=name,
        device_memory_bytes=device_memory,
        cores=cores,
        memory_bytes=memory,
        fast_bf16=fast_bf16,
        compiler=find_compiler(),
        fp16=bool(gpus) or bool(_cpu_flags().intersection(FP16_FLAGS)),
    )


def find_compiler() -> str | None:
    """The C++ compiler that torch.compile would use on the CPU, or None."""
    named = os.environ.get("CXX")
    return _on_path(named) if named else _on_path("g++") or _on_path("clang++")


def _on_path(name: str) -> str | None:
    """As `shutil.which`, whose module costs a command half of the interpreter's bare start."""
    places = [Path(name)] if "/" in name else [Path(folder) / name for folder in os.get_exec_path()]
    return next((str(place) for place in places if os.access(place, os.X_OK) and place.is_file()), None)


def memory_limit_bytes() -> int:
    """Memory that this process may use: the machine's, or the control group's limit where it is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [total]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            limits.append(int(text))
    return min(limits)


def available_memory_bytes() -> int:
    """Memory that this process can still get: what the kernel calls available, or the limit where that is lower."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return memory_limit_bytes()
    found = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
    return memory_limit_bytes() if found is None else min(found, memory_limit_bytes())


def _nvidia_gpus() -> list[tuple[str, int, bool]]:
    """Name, memory bytes and whether bf16 has products of its own (compute capability 8) of each visible GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return []
    if not Path("/dev/nvidiactl").exists() or _on_path("nvidia-smi") is None:
        return []
    import subprocess

    query = ["nvidia-smi", "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits"]
    try:
        printed = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.rsplit(",", 2) for line in printed.splitlines() if line.count(",") >= 2]
    gpus = [(name.strip(), int(float(mib)) * 2**20, float(capability) >= 8.0) for name, mib, capability in rows]
    return gpus if visible is None else gpus[: len(visible.split(","))]


def _cpu_flags() -> set[str]:
    for line in _cpuinfo():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return set(value.split())
    return set()


def _cpu_has_bf16() -> bool:
    return bool(_cpu_flags().intersection(BF16_FLAGS))


def _processor_name() -> str:
    for line in _cpuinfo():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return os.uname().machine


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []

"""Environment, limits, directories, clock and versions."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from paceline.doctor.capture import files
from paceline.doctor.host import Clock, Folder, Limit
from paceline.doctor.variables import CAPTURED, NAMING_FILES
from paceline.run.secrets import is_secret

LIMITS = ("NOFILE", "NPROC", "MEMLOCK", "CORE", "STACK", "AS")
PACKAGES = ("paceline", "torch", "numpy", "msgspec", "safetensors", "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
WRITE_BYTES = 32 * 2**20
WRITE_SECONDS = 2.0
_TIME_ERROR = 5
_STA_UNSYNC = 0x0040


def host_name() -> str:
    return os.uname().nodename


def environment_variables() -> dict[str, str]:
    """What libraries of this job read; nothing whose name or value looks like a secret."""
    kept = {name: value for name, value in sorted(os.environ.items()) if name.startswith(CAPTURED)}
    return {name: value for name, value in kept.items() if not is_secret(name, value)}


def named_files(env: Mapping[str, str]) -> dict[str, bool]:
    """Of each variable that names a file whether it is there."""
    return {name: Path(env[name]).exists() for name in NAMING_FILES if env.get(name)}


def limits() -> dict[str, Limit]:
    """Resource limits of this process, by their short names in lower case."""
    found = {}
    for name in LIMITS:
        number = getattr(resource, f"RLIMIT_{name}", None)
        if number is not None:
            found[name.lower()] = Limit(*(-1 if n == resource.RLIM_INFINITY else n for n in resource.getrlimit(number)))
    return found


def folders(wanted: Mapping[str, Path], write_probe: bool) -> tuple[Folder, ...]:
    """The directories of every job and those of `wanted`; a directory that is not there yet counts as its nearest parent."""
    usual = {"shm": Path("/dev/shm"), "tmp": Path(tempfile.gettempdir()), "run": Path.cwd()}
    mounts = _mounts()
    found = []
    for role, path in {**usual, **wanted}.items():
        if role == "shm" and not path.is_dir():
            continue
        found.append(_folder(role, path, mounts, write_probe and role == "checkpoint"))
    return tuple(found)


def _folder(role: str, path: Path, mounts: list[tuple[str, str, str]], probe: bool) -> Folder:
    place = _nearest(path.absolute())
    state = os.statvfs(place)
    kind, options = _mount_of(place, mounts)
    writable = os.access(place, os.W_OK)
    return Folder(
        role=role,
        path=str(path),
        kind=kind,
        size=state.f_blocks * state.f_frsize,
        free=state.f_bavail * state.f_frsize,
        inodes=state.f_files,
        inodes_free=state.f_favail,
        read_only="ro" in options.split(",") or bool(state.f_flag & os.ST_RDONLY),
        writable=writable,
        write_rate=_write_rate(place) if probe and writable else None,
    )


def _nearest(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _mounts() -> list[tuple[str, str, str]]:
    """(place, kind, options) of all mounts, the deepest place first."""
    rows = [line.split() for line in files.text("/proc/self/mounts").splitlines()]
    found = [(row[1].replace("\\040", " "), row[2], row[3]) for row in rows if len(row) >= 4]
    return sorted(found, key=lambda mount: -len(mount[0]))


def _mount_of(path: Path, mounts: list[tuple[str, str, str]]) -> tuple[str, str]:
    real = path.resolve()
    for place, kind, options in mounts:
        if real == Path(place) or Path(place) in real.parents:
            return kind, options
    return "", ""


def _write_rate(folder: Path) -> float | None:
    """Bytes per second of a file without a name that is written and synced."""
    block = os.urandom(2**20)
    try:
        with tempfile.TemporaryFile(dir=folder) as handle:
            began, written = time.perf_counter(), 0
            while written < WRITE_BYTES and time.perf_counter() - began < WRITE_SECONDS:
                written += handle.write(block)
            handle.flush()
            os.fsync(handle.fileno())
            return written / (time.perf_counter() - began)
    except OSError:
        return None


class _Timex(ctypes.Structure):
    """The head of the kernel's `struct timex`; room for the rest behind it."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


def clock() -> Clock:
    """Whether the kernel says that its clock is kept in step.

    Raises:
        NotThere: this system has no such call.
    """
    if sys.platform != "linux":
        raise files.NotThere("only Linux says whether its clock is kept in step")
    state = _Timex()
    code = ctypes.CDLL(None, use_errno=True).ntp_adjtime(ctypes.byref(state))
    if code < 0:
        raise files.NotThere("the kernel does not say whether its clock is kept in step")
    return Clock(synchronised=code != _TIME_ERROR and not state.status & _STA_UNSYNC, error=state.esterror / 1e6)


def versions() -> dict[str, str]:
    """Of Python, the kernel, the driver and the packages that ranks must share."""
    found = {"python": platform.python_version(), "kernel": platform.release()}
    for name in PACKAGES:
        try:
            found[name.partition("-cu")[0].replace("nvidia-", "")] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    cuda = _cuda_of_torch()
    if cuda:
        found["cuda"] = cuda
    driver = files.text("/sys/module/nvidia/version") or files.text("/sys/module/amdgpu/version")
    return {**found, "driver": driver} if driver else found


def _cuda_of_torch() -> str:
    """The CUDA that torch was built for, from its own version file: importing it would take seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    match = re.search(r'^cuda\b[^=]*= *["\']([0-9.]+)', files.text(Path(spec.origin).with_name("version.py")), re.M)
    return match[1] if match else ""


def is_virtual() -> bool:
    """Whether this is a virtual machine, as its processor says."""
    return any("hypervisor" in line for line in files.text("/proc/cpuinfo").splitlines() if line.startswith("flags"))

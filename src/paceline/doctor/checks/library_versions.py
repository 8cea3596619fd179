"""Versions that are known not to work together."""

from collections.abc import Iterator

from paceline.doctor.check import Check, Found, Given
from paceline.doctor.host import Host

TORCH = (2, 11)
DRIVERS = {"12": (525, 60), "13": (580, 65)}
"""Oldest Linux driver for a major version of CUDA."""
NVLS_FALLBACK = ((2, 27), (2, 28))


def look(host: Host, given: Given) -> Iterator[Found]:
    torch = host.versions.get("torch", "")
    if torch and numbers(torch)[:2] < TORCH:
        yield Found(
            found=f"torch {torch}", mend=f"pip install 'torch>={TORCH[0]}.{TORCH[1]}'",
            why=f"paceline needs {TORCH[0]}.{TORCH[1]} or newer: 1 missing name ends the run at the start",
        )  # fmt: skip
    driver, cuda = host.versions.get("driver", ""), host.versions.get("cuda", "")
    least = DRIVERS.get(cuda.partition(".")[0])
    if least and driver and numbers(driver)[:2] < least and any(g.vendor == "nvidia" for g in host.gpus):
        yield Found(
            found=f"driver {driver} under CUDA {cuda}",
            mend=f"install driver {least[0]} or newer, or a torch built for an older CUDA",
        )
    nccl = host.versions.get("nccl", "")
    if nccl and numbers(nccl)[:2] in NVLS_FALLBACK and any(g.nvlink and g.nvlink.links >= 18 for g in host.gpus):
        yield Found(
            found=f"NCCL {nccl}, on GPUs with NVLink SHARP",
            mend="pip install -U nvidia-nccl-cu12 (2.29 or newer), or export NCCL_NVLS_ENABLE=0 until then",
            why="2.27 and 2.28 fall back silently where it cannot be set up, and hang if that happens on some ranks only",
            severity="warning",
            source="NCCL user guide, NCCL_NVLS_ENABLE",
        )


def numbers(version: str) -> tuple[int, ...]:
    """(2, 13, 0) of `2.13.0+cpu`."""
    parts = version.partition("+")[0].split(".")
    return tuple(int(p) for p in parts if p.isdigit())


CHECK = Check(
    id="library-versions",
    severity="error",
    title="Versions of torch, CUDA, the driver or NCCL do not work together",
    why="CUDA refuses to start under an older driver, and 0 GPUs are seen",
    mend="install versions that fit",
    source="NVIDIA, CUDA compatibility, table of minimum drivers",
    needs=("versions",),
    look=look,
)

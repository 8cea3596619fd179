"""Errors that the driver wrote to the kernel log since the host started."""

from collections import Counter
from collections.abc import Iterator

from paceline.doctor.check import Check, Found, Given, Severity
from paceline.doctor.host import Host

MEANINGS: dict[int, tuple[Severity, str, str]] = {
    48: ("error", "double-bit memory error", "drain the host and reset the GPU: nvidia-smi --gpu-reset -i INDEX"),
    61: ("error", "internal micro-controller halt", "reset the GPU; replace it if that comes back"),
    62: ("error", "internal micro-controller halt", "reset the GPU; replace it if that comes back"),
    63: ("warning", "a memory row was remapped", "reset the GPU when no job runs, so that the row is used"),
    64: ("error", "a memory row could not be remapped", "drain the host; have the GPU replaced"),
    74: ("error", "NVLink error", "nvidia-smi nvlink -e; reset; have the board checked if it comes back"),
    79: ("error", "GPU has fallen off the bus", "restart the host; check power and seating; then replace"),
    92: ("warning", "many single-bit memory errors", "watch nvidia-smi -q -d ECC; replace if they rise"),
    94: ("error", "contained memory error", "start the job anew; the GPU itself goes on"),
    95: ("error", "uncontained memory error", "reset the GPU before anything else runs on it"),
    119: ("error", "the GPU's system processor timed out", "reset the GPU or restart the host; update the driver"),
    120: ("error", "the GPU's system processor failed", "reset the GPU or restart the host; update the driver"),
    140: ("error", "unrecovered memory error", "reset the GPU before anything else runs on it"),
}
"""What hardware is to blame for; other numbers are mostly the program's (13, 31, 43)."""


def look(host: Host, given: Given) -> Iterator[Found]:
    counts = Counter((xid.number, xid.bus) for xid in host.xids if xid.number in MEANINGS)
    for (number, bus), count in sorted(counts.items()):
        severity, meaning, mend = MEANINGS[number]
        gpu = next((g for g in host.gpus if g.bus.startswith(bus) or bus.startswith(g.bus)), None)
        name = f"GPU {gpu.index} ({gpu.uuid})" if gpu and gpu.bus else f"the GPU at {bus}"
        index = str(gpu.index) if gpu and gpu.bus else "INDEX"
        yield Found(
            found=f"Xid {number}, {meaning}, {count} time{'s' * (count > 1)} on {name}",
            mend=mend.replace("INDEX", index),
            severity=severity,
        )


CHECK = Check(
    id="gpu-xid",
    severity="error",
    title="The kernel log holds hardware errors of a GPU",
    why="220 of the 419 interruptions of Llama 3's 54 days were faulty GPUs or their memory; one that failed fails again",
    mend="drain the host; reset or replace the GPU",
    source="NVIDIA, XID Errors; Llama 3 report, table 5",
    needs=("gpus", "xids"),
    gpus=True,
    look=look,
)

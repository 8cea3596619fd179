"""Host memory: what is left, what the control group allows, and whether the kernel has killed for it before."""

from collections.abc import Iterator

from paceline.doctor.check import Check, Found, Given
from paceline.doctor.host import Host
from paceline.units import GiB, format_bytes

LEAST_PER_RANK = 1 * GiB
"""A rank that has imported torch and holds no model."""
SHARE = 0.95


def look(host: Host, given: Given) -> Iterator[Found]:
    memory = host.memory
    if memory is None:
        return
    ranks, job = given.local_ranks(host), given.job
    room = memory.available
    if memory.limit is not None and memory.limit_used is not None:
        room = min(room, memory.limit - memory.limit_used)
    need = ranks * (job.memory if job is not None and job.on_cpu and job.memory else LEAST_PER_RANK)
    if room < need:
        limit = f", the control group's limit is {format_bytes(memory.limit)}" if memory.limit is not None else ""
        yield Found(
            found=f"{format_bytes(max(0, room))} of {format_bytes(memory.total)} are available{limit}; {ranks} ranks need "
            f"{format_bytes(need)}",
            mend="end what holds it (ps aux --sort -rss | head), raise the container's limit, or start fewer ranks",
        )
    if memory.oom_kills:
        yield Found(
            found=f"the kernel has killed {memory.oom_kills} process{'es' * (memory.oom_kills > 1)} of this control group "
            "for memory",
            mend="dmesg | grep -i oom; raise the container's limit, or lower data.workers and batch.microbatch",
            severity="warning",
        )


CHECK = Check(
    id="memory-room",
    severity="error",
    title="Host memory is short, or the kernel has killed for it",
    why="the kernel ends 1 rank with SIGKILL, without a word in its output, and the others wait for it",
    mend="free memory, or raise the control group's limit",
    source="Linux kernel documentation, control group v2, memory",
    needs=("memory",),
    look=look,
)

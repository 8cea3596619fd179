"""Timeouts that end in the wrong order: the fabric's must come before the collective's, the monitor's after a save."""

from collections.abc import Iterator

from paceline.doctor.check import Check, Found, Given
from paceline.doctor.host import Host
from paceline.units import format_seconds

DEFAULT_COLLECTIVE_SECONDS = 600.0
TICK = 4.096e-6


def look(host: Host, given: Given) -> Iterator[Found]:
    collective = given.job.collective_timeout if given.job is not None else DEFAULT_COLLECTIVE_SECONDS
    env = host.environment
    timeout, retries = env.get("NCCL_IB_TIMEOUT", ""), env.get("NCCL_IB_RETRY_CNT", "")
    if timeout.isdigit() and 0 < int(timeout) < 32:
        count = int(retries) if retries.isdigit() else 7
        seconds = TICK * 2 ** int(timeout) * count
        if seconds > collective:
            yield Found(
                found=f"NCCL_IB_TIMEOUT={timeout} with {count} retries is {format_seconds(seconds)}, a collective gives up "
                f"after {format_seconds(collective)}",
                mend="export NCCL_IB_TIMEOUT=22, or unset NCCL_IB_TIMEOUT",
            )
    heartbeat = env.get("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "")
    saved = given.job.saved if given.job is not None else None
    if heartbeat.isdigit() and saved is not None and int(heartbeat) < saved:
        yield Found(
            found=f"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC={heartbeat}, and this run's longest save took {format_seconds(saved)}",
            mend=f"export TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC={int(saved * 2) + 1}",
            why="a save that holds the interpreter for as long looks like a stuck watchdog: 1 slow save ends the run",
        )


CHECK = Check(
    id="timeouts",
    severity="warning",
    title="Timeouts end in the wrong order",
    why="a dead link is reported as a slow rank: the collective gives up first, after 600 s, and blames a peer",
    mend="let the fabric's timeout be the shortest",
    source="NCCL user guide, NCCL_IB_TIMEOUT; torch, ProcessGroupNCCL.hpp",
    needs=("environment",),
    look=look,
)

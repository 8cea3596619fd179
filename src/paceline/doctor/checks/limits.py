"""Limits on open files and processes."""

from collections.abc import Iterator

from paceline.doctor.check import Check, Found, Given
from paceline.doctor.host import Host

FILES_BASE, FILES_PER_RANK = 512, 64
PROCESSES_PER_RANK = 64
"""A rank with its threads, its loader and theirs."""


def look(host: Host, given: Given) -> Iterator[Found]:
    ranks = given.local_ranks(host)
    world = given.job.world_size if given.job is not None else ranks * len({h.name for h in given.hosts})
    files = FILES_BASE + FILES_PER_RANK + 4 * world
    for name, need, word, flag in (
        ("nofile", files, "open files", "n"),
        ("nproc", PROCESSES_PER_RANK * ranks, "processes and threads", "u"),
    ):
        limit = host.limits.get(name)
        if limit is not None and 0 <= limit.soft < need:
            can = limit.hard < 0 or limit.hard >= need
            yield Found(
                found=f"the limit on {word} is {limit.soft}; {ranks} ranks of {world} need about {need}",
                mend=f"ulimit -{flag} {max(need, 65536) if limit.hard < 0 else max(need, min(limit.hard, 65536))}"
                if can
                else f"raise the hard limit ({limit.hard}) in /etc/security/limits.conf",
            )


CHECK = Check(
    id="limits",
    severity="warning",
    title="The limit on open files or on processes is low",
    why="each pair of ranks is 1 socket and each shard 1 file: the run ends with 'too many open files'",
    mend="ulimit -n 65536",
    source="getrlimit(2); pytorch issue 11201",
    needs=("limits",),
    look=look,
)

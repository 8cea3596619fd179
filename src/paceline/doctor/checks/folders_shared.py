"""The run and checkpoint directories are the same for all hosts."""

from collections.abc import Iterator, Sequence

from paceline.doctor.check import Check, Found, Given, Skip
from paceline.doctor.checks.file_system import NETWORK
from paceline.doctor.host import Host


def compare(hosts: Sequence[Host], given: Given) -> Iterator[Found]:
    if not given.several:
        raise Skip("one host: its ranks share its directories")
    if given.job is not None and "://" in given.job.checkpoint_place:
        return
    for role in ("run", "checkpoint"):
        local = [f"{h.name} ({f.kind})" for h in hosts if (f := h.folder(role)) and f.kind and f.kind not in NETWORK]
        if local:
            path = next(f.path for h in hosts if (f := h.folder(role)))
            yield Found(
                found=f"{path} ({role}) is on a file system of its own on {', '.join(local[:4])}{', ...' * (len(local) > 4)}",
                mend="put run.dir (checkpoint.dir) on a file system that all hosts mount, or checkpoint.dir in a bucket",
            )


CHECK = Check(
    id="folders-shared",
    severity="error",
    title="Several hosts would write a run or its checkpoints each into a directory of its own",
    why="each host keeps 1 part of every checkpoint, and none can be loaded after a host is lost",
    mend="put run.dir on a shared file system",
    source="paceline, docs/guide/checkpoints.md",
    needs=("folders",),
    job=True,
    compare=compare,
)

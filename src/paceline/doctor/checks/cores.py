"""CPUs per rank: one at least, and with GPUs enough for the rank, its loader and the writer."""

from collections.abc import Iterator

from paceline.doctor.check import Check, Found, Given
from paceline.doctor.host import Host


def look(host: Host, given: Given) -> Iterator[Found]:
    if host.cpu is None:
        return
    ranks, cpus = given.local_ranks(host), host.cpu.usable
    of = f" (of {len(host.cpu.online)}, the rest are not this job's)" if cpus < len(host.cpu.online) else ""
    if ranks > cpus:
        yield Found(
            found=f"{ranks} ranks on {cpus} CPUs{of}",
            mend=f"--procs {cpus}, or ask for {ranks} CPUs (--cpus-per-task, a container's --cpus)",
            severity="error",
        )
        return
    workers = given.job.loader_workers if given.job is not None else 1
    need = 1 + workers + 1
    if host.gpus and cpus < ranks * need:
        yield Found(
            found=f"{cpus} CPUs{of} for {ranks} ranks with {workers} loader process{'es' * (workers != 1)} each: "
            f"{cpus / ranks:.1f} a rank",
            mend=f"ask for {ranks * need} CPUs, or lower data.workers",
            why=f"a rank, its loader and its share of the writer want {need} CPUs; starved loaders leave GPUs idle",
        )


CHECK = Check(
    id="cores",
    severity="warning",
    title="There are fewer CPUs than ranks, or too few beside GPUs",
    why="2 ranks on one CPU take turns: each step takes 2 times as long",
    mend="start fewer ranks, or ask for more CPUs",
    source="torchrun documentation; Slurm documentation, --cpus-per-task",
    needs=("cpu",),
    look=look,
)

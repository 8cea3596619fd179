"""Threads per rank against the CPUs there are. BL-83 is the run's side of it."""

from collections.abc import Iterator

from paceline.doctor.check import Check, Found, Given
from paceline.doctor.host import Host
from paceline.workers.affinity import THREAD_VARIABLES


def look(host: Host, given: Given) -> Iterator[Found]:
    if host.cpu is None:
        return
    ranks, cpus = given.local_ranks(host), host.cpu.usable
    share = max(1, cpus // ranks)
    openmp, mkl = (host.environment.get(name, "") for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"))
    if openmp.isdigit() and mkl.isdigit() and openmp != mkl:
        yield Found(
            found=f"OMP_NUM_THREADS={openmp} beside MKL_NUM_THREADS={mkl}: torch takes {mkl}",
            mend="unset MKL_NUM_THREADS",
            why=f"of {openmp} threads that were asked for a rank has {mkl}, where torch is built with MKL",
        )
    for name in THREAD_VARIABLES:
        text = host.environment.get(name, "").split(",")[0].strip()
        if not text.isdigit() or int(text) < 1:
            continue
        threads = int(text)
        plural = "s" if ranks > 1 else ""
        if threads * ranks > max(cpus, ranks):
            yield Found(
                found=f"{name}={threads}: {ranks} rank{plural} x {threads} threads on {cpus} CPUs",
                mend=f"export {name}={share}, or unset {name} and let the launcher divide",
                why=f"{threads * ranks / cpus:.0f} threads want each CPU, and a parallel region ends with its last thread",
                severity="error" if threads * ranks >= 4 * cpus else "warning",
            )
        elif threads == 1 and share >= 4 and not host.gpus and name == "OMP_NUM_THREADS":
            yield Found(
                found=f"{name}=1: {ranks} rank{plural} on {cpus} CPUs compute with {ranks} of them",
                mend=f"export {name}={share}, or start with paceline, which divides",
                why=f"1 of the {share} CPUs of each rank is used; torchrun sets 1 where nothing is set",
            )


CHECK = Check(
    id="threads",
    severity="warning",
    title="Threads per rank are more than its CPUs, one where it has many, or set twice",
    why="with 2 threads for each CPU a parallel region takes at least 2 times as long",
    mend="unset OMP_NUM_THREADS: paceline divides the CPUs over the ranks",
    source="torchrun documentation, OMP_NUM_THREADS",
    needs=("environment", "cpu"),
    look=look,
)

"""launch.threads of the job against the CPUs of the host."""

from collections.abc import Iterator

from paceline.doctor.check import Check, Found, Given
from paceline.doctor.host import Host


def look(host: Host, given: Given) -> Iterator[Found]:
    job = given.job
    if job is None or job.threads is None or host.cpu is None:
        return
    ranks, cpus = given.local_ranks(host), host.cpu.usable
    if job.threads * ranks > max(cpus, ranks):
        yield Found(found=f"launch.threads={job.threads} x {ranks} ranks on {cpus} CPUs", mend='launch.threads="auto"')


CHECK = Check(
    id="job-threads",
    severity="warning",
    title="launch.threads of the job asks for more threads than there are CPUs",
    why="with 2 threads for each CPU a parallel region takes at least 2 times as long",
    mend='launch.threads="auto"',
    source="torchrun documentation, OMP_NUM_THREADS",
    needs=("cpu",),
    job=True,
    look=look,
)

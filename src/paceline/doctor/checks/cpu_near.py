"""CPUs that a job may use, against the sockets that its GPUs hang on."""

from collections.abc import Iterator

from paceline.doctor.check import Check, Found, Given
from paceline.doctor.host import Host
from paceline.workers.affinity import cpu_list


def look(host: Host, given: Given) -> Iterator[Found]:
    if host.cpu is None:
        return
    allowed = set(host.cpu.allowed)
    far = [gpu for gpu in host.gpus if gpu.cpus and not allowed & set(gpu.cpus)]
    if far:
        first = far[0]
        yield Found(
            found=f"GPU {', '.join(str(g.index) for g in far)} hang{'s' * (len(far) == 1)} on NUMA node {first.node} "
            f"(CPUs {cpu_list(first.cpus)}), this job may use CPUs {cpu_list(host.cpu.allowed)}",
            mend=f"let the job have CPUs of that node: taskset -c {cpu_list(sorted(allowed | set(first.cpus)))}, "
            "or Slurm's --gpu-bind=closest",
        )


CHECK = Check(
    id="cpu-near",
    severity="warning",
    title="A GPU's own CPUs are not among those that the job may use",
    why="launches and copies cross the sockets: typically 1 to 10% of a step",
    mend="let the job have CPUs of each GPU's NUMA node",
    source="torch, torch/numa/binding.py",
    needs=("cpu", "gpus"),
    gpus=True,
    look=look,
)

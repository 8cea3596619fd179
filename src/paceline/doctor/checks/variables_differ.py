"""Variables that are not equal on all hosts."""

from collections.abc import Iterator, Sequence

from paceline.doctor.check import Check, Found, Given
from paceline.doctor.differ import differences
from paceline.doctor.host import Host
from paceline.doctor.variables import EFFECTS

OWN = ("CUDA_VISIBLE_DEVICES", "NCCL_DEBUG_FILE", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA",
       "NCCL_VERSION", "NCCL_HOME", "NCCL_ROOT", "NCCL_TOPO_FILE", "NCCL_CONF_FILE", "NCCL_RAS_ADDR")  # fmt: skip
"""May differ: each rank's own, or a name that another check judges on its host."""


def compare(hosts: Sequence[Host], given: Given) -> Iterator[Found]:
    names = sorted({n for h in hosts for n in h.environment if n.startswith(EFFECTS) and n not in OWN})
    for name in names:
        for text in differences(hosts, lambda host, name=name: host.environment.get(name, "unset")):  # type: ignore[misc]
            yield Found(found=f"{name} is {text}", mend=f"give {name} one value on all hosts, or unset it on all")


CHECK = Check(
    id="variables-differ",
    severity="error",
    title="A variable of NCCL, torch or OpenMP differs between hosts",
    why="ranks then choose other protocols, networks or timeouts: 1 host is enough for a hang at the start",
    mend="set the same environment on all hosts",
    source="NCCL user guide, Environment Variables",
    needs=("environment",),
    compare=compare,
)

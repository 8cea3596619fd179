"""A governor that holds the clock at its lowest."""

from collections.abc import Iterator

from paceline.doctor.check import Check, Found, Given
from paceline.doctor.host import Host


def look(host: Host, given: Given) -> Iterator[Found]:
    governor = host.cpu.governor if host.cpu else ""
    # The pstate drivers' own powersave follows the load.
    if governor.startswith("powersave") and "pstate" not in governor:
        yield Found(found=f"the CPU frequency governor is {governor}")


CHECK = Check(
    id="cpu-governor",
    severity="warning",
    title="The CPU frequency governor is powersave",
    why="the clock stays at its lowest: held at 1 GHz of 3, launches, loaders and Gloo run at a third of their speed",
    mend="cpupower frequency-set -g performance",
    source="Linux kernel documentation, CPU performance scaling",
    needs=("cpu",),
    look=look,
)

"""Other processes that want the CPUs."""

from collections.abc import Iterator

from paceline.doctor.check import Check, Found, Given
from paceline.doctor.host import Host

BUSY = 0.8


def look(host: Host, given: Given) -> Iterator[Found]:
    cpu = host.cpu
    if cpu is None or cpu.load is None or host.place is not None:
        return
    # Both: the load lags by a minute, and a moment's use may be this command's own neighbours at a start.
    if cpu.load > len(cpu.online) and cpu.busy is not None and cpu.busy > BUSY:
        yield Found(
            found=f"{cpu.load:.1f} processes wanted one of {len(cpu.online)} CPUs over the last minute, and "
            f"{cpu.busy:.0%} of their time is used now",
            why=f"a rank gets {len(cpu.online) / (cpu.load + len(cpu.online)):.0%} of its time, and all ranks wait for it",
        )


CHECK = Check(
    id="cpu-busy",
    severity="warning",
    title="Other processes want more CPUs than there are",
    why="with as many processes as ranks on each CPU, each gets 50% of the time and every step takes 2 times as long",
    mend="top -o %CPU; end them or wait",
    source="Linux kernel documentation, /proc/loadavg",
    needs=("cpu",),
    look=look,
)

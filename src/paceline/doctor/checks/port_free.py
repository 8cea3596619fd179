"""The port where ranks would meet. BL-70 is the run's side of it."""

from collections.abc import Iterator

from paceline.doctor.check import Check, Found, Given, Skip
from paceline.doctor.host import Host


def look(host: Host, given: Given) -> Iterator[Found]:
    port = host.port
    if port is None:
        raise Skip("no port is set: a run on one host takes a free one")
    if not port.free:
        holder = f", by {port.holder}" if port.holder else ""
        yield Found(
            found=f"port {port.number} is in use{holder}",
            mend='end that process, or launch.port = "auto" for a free one',
        )
    elif port.low <= port.number <= port.high:
        yield Found(
            found=f"port {port.number} lies in the range {port.low} to {port.high} that the kernel gives to connections",
            mend=f"choose one below {port.low}, or sysctl net.ipv4.ip_local_reserved_ports={port.number}",
            why="any of this host's connections may hold it at the next start: 1 start in many fails",
            severity="warning",
        )


CHECK = Check(
    id="port-free",
    severity="error",
    title="The port where ranks would meet is taken, or can be at any time",
    why="rank 0 cannot listen and 0 ranks start, or they join another job's store",
    mend='launch.port = "auto"',
    source="ip(7), ip_local_port_range",
    needs=("port",),
    look=look,
)

"""Other hosts as this one resolves and reaches them. BL-71."""

from collections.abc import Iterator

from paceline.doctor.check import Check, Found, Given, Skip
from paceline.doctor.host import Host


def look(host: Host, given: Given) -> Iterator[Found]:
    if not host.peers:
        raise Skip("no other host is known: start it on each with torchrun, or set MASTER_ADDR")
    for peer in host.peers:
        if not peer.address:
            yield Found(
                found=f"{host.name} cannot resolve {peer.name}: {peer.reason or 'no address'}",
                mend=f"put {peer.name} into /etc/hosts of {host.name}, or give its address (MASTER_ADDR)",
            )
        elif peer.reachable is False:
            yield Found(
                found=f"{host.name} does not reach {peer.name} at {peer.address} port {peer.port}: {peer.reason}",
                mend=f"nc -vz {peer.address} {peer.port}; open the port in firewalls, and the range of "
                "net.ipv4.ip_local_port_range between the hosts",
            )


CHECK = Check(
    id="peers",
    severity="error",
    title="A host cannot resolve or reach another one",
    why="the rendezvous waits for the missing host until its timeout, 300 s with paceline's default",
    mend="mend name resolution, or give addresses",
    source="pytorch issues 73380 and 79388",
    needs=("peers",),
    look=look,
)

"""What this host's own name resolves to. BL-71."""

from collections.abc import Iterator

from paceline.doctor.check import Check, Found, Given
from paceline.doctor.host import Host

SLOW_SECONDS = 1.0


def look(host: Host, given: Given) -> Iterator[Found]:
    names = host.names
    if names is None:
        return
    if names.seconds > SLOW_SECONDS:
        yield Found(
            found=f"resolving {names.host} took {names.seconds:.1f} s",
            mend="resolvectl status; put the name into /etc/hosts",
            why=f"each connection that is made by name waits {names.seconds:.1f} s, at the start of every rank",
            severity="warning",
        )
    if not given.several:
        return
    if not names.addresses:
        yield Found(found=f"this host's own name, {names.host}, resolves to nothing")
    elif all(a.startswith("127.") or a == "::1" for a in names.addresses):
        address = next((a for i in host.networks() for a in i.addresses if "." in a), "ADDRESS")
        yield Found(
            found=f"this host's own name, {names.host}, resolves to {', '.join(names.addresses)}: the loopback",
            mend=f"in /etc/hosts give {names.host} the address {address}, or set MASTER_ADDR to an address and "
            "GLOO_SOCKET_IFNAME to an interface",
        )


CHECK = Check(
    id="names",
    severity="error",
    title="A host's own name resolves to nothing, to the loopback, or slowly",
    why="Gloo tells the others the address of this name: they connect to themselves until a timeout, 1800 s by default",
    mend="put the name and its address into /etc/hosts on every host",
    source="pytorch issues 73656 and 150532",
    needs=("names",),
    look=look,
)

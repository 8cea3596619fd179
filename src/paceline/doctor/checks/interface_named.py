"""Interface variables name interfaces that are there, up, and lead to other hosts. BL-72."""

from collections.abc import Iterator

from paceline.doctor.check import Check, Found, Given
from paceline.doctor.host import Host
from paceline.workers.interfaces import GLOO, NCCL, selected


def look(host: Host, given: Given) -> Iterator[Found]:
    for name in (NCCL, GLOO):
        value = host.environment.get(name, "").strip()
        if not value:
            continue
        found = selected(name, value, host.interfaces)
        usable = [i.name for i in host.networks() if i.addresses] or ["none"]
        mend = f"export {name}={'=' if name == NCCL else ''}{usable[0]}, or unset {name}"
        if not found:
            there = ", ".join(i.name for i in host.interfaces)
            yield Found(found=f"{name}={value} names no interface of this host, which has {there}", mend=mend)
            continue
        chosen = next((i for i in found if i.up), None)
        if chosen is None:
            yield Found(found=f"{name}={value} selects {found[0].name}, which is down", mend=mend)
        elif given.several and all(i.kind == "loopback" for i in found if i.up):
            yield Found(
                found=f"{name}={value} leaves only {chosen.name}, the loopback, and there are several hosts", mend=mend
            )
        elif given.several and all(i.kind in ("bridge", "veth", "loopback") for i in found if i.up):
            yield Found(
                found=f"{name}={value} selects {chosen.name}, a bridge of this host that no other host reaches",
                mend=mend,
            )
        elif not any(i.addresses for i in found if i.up):
            yield Found(found=f"{name}={value} selects {chosen.name}, which has no address", mend=mend)


CHECK = Check(
    id="interface-named",
    severity="error",
    title="NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME selects no interface that reaches the other hosts",
    why="ranks wait for each other at the start until a timeout: 1800 s with Gloo's default",
    mend="name an interface that is up on every host, or unset the variable",
    source="NCCL user guide, NCCL_SOCKET_IFNAME; NVIDIA/nccl issue 286",
    needs=("environment", "interfaces"),
    look=look,
)

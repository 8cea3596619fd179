"""GIDs: RoCE needs one of version 2 that routes, and a fixed index must hold it."""

from collections.abc import Iterator

from paceline.doctor.check import Check, Found, Given
from paceline.doctor.host import Host, RdmaPort

VARIABLE = "NCCL_IB_GID_INDEX"


def look(host: Host, given: Given) -> Iterator[Found]:
    text = host.environment.get(VARIABLE, "").strip()
    fixed = int(text) if text.isdigit() else None
    for port in host.fabric():
        if port.link != "Ethernet" or port.driver == "efa":
            continue
        good = [g for g in port.gids if "v2" in g.type.lower() and g.ipv4]
        if not good:
            yield Found(
                found=f"{port.device} port {port.port} has no RoCE v2 GID with an IPv4 address, of {len(port.gids)} GIDs",
                mend=f"give {port.interface or 'its interface'} an IPv4 address: ip addr add ADDRESS dev "
                f"{port.interface or 'IFACE'}; for IPv6, export NCCL_IB_ADDR_FAMILY=AF_INET6",
            )
        elif fixed is not None:
            yield from _fixed(port, fixed, good[0].index)


def _fixed(port: RdmaPort, fixed: int, good: int) -> Iterator[Found]:
    entry = next((g for g in port.gids if g.index == fixed), None)
    mend = f"unset {VARIABLE} (NCCL since 2.21 picks one), or export {VARIABLE}={good}"
    if entry is None:
        yield Found(found=f"{VARIABLE}={fixed}: {port.device} has no GID at that index", mend=mend)
    elif "v2" not in entry.type.lower() or not entry.ipv4:
        yield Found(
            found=f"{VARIABLE}={fixed}: {port.device} has {entry.type or 'no type'} {entry.gid} there, not RoCE v2 over IPv4",
            mend=mend,
        )


CHECK = Check(
    id="gids",
    severity="error",
    title="A RoCE port has no GID that routes, or a fixed index holds another one",
    why="queue pairs do not connect: NCCL fails at the start, or retries for 30 s and fails",
    mend="unset NCCL_IB_GID_INDEX",
    source="NCCL user guide, NCCL_IB_GID_INDEX; NVIDIA/nccl issue 1131",
    needs=("environment", "rdma"),
    rdma=True,
    look=look,
)

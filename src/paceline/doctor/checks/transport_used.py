"""The network that NCCL used, by its own log, against the ones that are there and the one that was asked for. BL-73."""

from collections.abc import Iterator

from paceline.doctor.check import Check, Found, Given, Skip
from paceline.doctor.host import Host
from paceline.units import format_bandwidth


def look(host: Host, given: Given) -> Iterator[Found]:
    if host.transports is None:
        raise Skip(
            "there is no log of NCCL: run with NCCL_DEBUG=INFO NCCL_DEBUG_FILE=nccl.%h.%p, then doctor with the same"
        )
    ports = host.fabric()
    if ports and "Socket" in host.transports:
        rate = format_bandwidth(max(port.rate for port in ports) / 8)
        yield Found(
            found=f"NCCL's log says Using network Socket, and {len(ports)} RDMA ports of {rate} each are active"
        )
    fast = [name for name in host.transports if name != "Socket"]
    off = host.environment.get("NCCL_IB_DISABLE", "0").strip() not in ("0", "")
    if off and fast:
        yield Found(
            found=f"NCCL_IB_DISABLE is set, and NCCL's log says that it uses {', '.join(fast)}: the variable had no effect",
            mend="to force sockets for a test, NCCL_NET=Socket NCCL_NET_PLUGIN=none; else unset NCCL_IB_DISABLE",
            why="a network plugin need not read it: what is measured under it is 1 network, taken for another",
            severity="warning",
        )


CHECK = Check(
    id="transport-used",
    severity="error",
    title="NCCL used IP sockets beside active RDMA ports, or another network than was asked for",
    why="the run works, at the rate of 1 IP interface, and nobody notices",
    mend="NCCL_DEBUG=INFO says why each RDMA device was left; look at NCCL_IB_HCA, NCCL_IB_DISABLE and the network plugin",
    source="NCCL user guide, Troubleshooting, Networking; NVIDIA/nccl issues 1105",
    needs=("transports", "rdma", "environment"),
    rdma=True,
    look=look,
)

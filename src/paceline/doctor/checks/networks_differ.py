"""Interfaces, MTU, RDMA devices and GID indices that are not alike on all hosts. BL-72."""

from collections.abc import Callable, Iterator, Sequence

from paceline.doctor.check import Check, Found, Given
from paceline.doctor.differ import differences
from paceline.doctor.host import Host
from paceline.units import format_bandwidth
from paceline.workers.interfaces import selected


def compare(hosts: Sequence[Host], given: Given) -> Iterator[Found]:
    for text in differences(hosts, _main_mtu):
        yield Found(
            found=f"the MTU of the interface to other hosts is {text}",
            mend="ip link set IFACE mtu with one value on all hosts",
            why="packets above the smaller MTU vanish where path discovery is blocked: small messages pass, 64 KiB hang",
            severity="error",
        )
    for text in differences(hosts, lambda host: str(len(host.fabric()))):
        yield Found(
            found=f"the number of active RDMA ports is {text}", severity="error", mend="ibstat on the host that differs"
        )
    for text in differences(hosts, _fabric_rate):
        yield Found(
            found=f"the rate of RDMA ports is {text}", mend="ibstat on the host that differs; reseat its cables"
        )
    for text in differences(hosts, _gid_index):
        yield Found(
            found=f"the index of the RoCE v2 GID is {text}, and NCCL_IB_GID_INDEX holds all hosts to one",
            mend="unset NCCL_IB_GID_INDEX (NCCL since 2.21 picks one on each host)",
            severity="error",
        )
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        for text in differences(hosts, _selects(name)):
            yield Found(found=f"{name} selects {text}", mend=f"unset {name}, or name what is there on each host")


def _main_mtu(host: Host) -> str:
    mtus = {i.mtu for i in host.networks() if i.addresses and i.kind != "virtual"}
    return "/".join(str(mtu) for mtu in sorted(mtus)) or "unknown"


def _fabric_rate(host: Host) -> str:
    rates = {port.rate for port in host.fabric()}
    return " and ".join(format_bandwidth(rate / 8) for rate in sorted(rates)) or "none"


def _gid_index(host: Host) -> str:
    if not host.environment.get("NCCL_IB_GID_INDEX", "").isdigit():
        return "free"
    good = {g.index for p in host.fabric() for g in p.gids if "v2" in g.type.lower() and g.ipv4}
    return "/".join(str(index) for index in sorted(good)) or "free"


def _selects(name: str) -> Callable[[Host], str]:
    def said(host: Host) -> str:
        value = host.environment.get(name, "")
        found = selected(name, value, host.interfaces) if value else []
        return "nothing" if value and not found else "an interface" if value else "unset"

    return said


CHECK = Check(
    id="networks-differ",
    severity="warning",
    title="MTU, RDMA ports or interface names differ between hosts",
    why="a ring goes as fast as its slowest host, and 1 host that picks another network does not connect",
    mend="make the hosts alike",
    source="NCCL user guide, NCCL_SOCKET_IFNAME and NCCL_IB_GID_INDEX; NVIDIA/nccl issue 1131",
    needs=("environment", "interfaces", "rdma"),
    compare=compare,
)

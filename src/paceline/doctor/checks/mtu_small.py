"""An Ethernet interface under RoCE whose packets are too small for RDMA's largest."""

from collections.abc import Iterator

from paceline.doctor.check import Check, Found, Given
from paceline.doctor.host import Host

ROCE_MTU = 4200
"""4096 bytes of payload and their headers."""


def look(host: Host, given: Given) -> Iterator[Found]:
    by_name = {i.name: i for i in host.interfaces}
    for port in host.fabric():
        interface = by_name.get(port.interface)
        if port.link == "Ethernet" and port.driver != "efa" and interface is not None and interface.mtu < ROCE_MTU:
            yield Found(
                found=f"{interface.name} under {port.device} has MTU {interface.mtu}; RoCE's largest packet needs {ROCE_MTU}",
                mend=f"ip link set {interface.name} mtu 9000 (and on the switch)",
            )


CHECK = Check(
    id="mtu-small",
    severity="warning",
    title="The interface under a RoCE device has a small MTU",
    why="RDMA then sends packets of 1024 bytes in place of 4096: 4 times as many for the card and the switches",
    mend="ip link set IFACE mtu 9000",
    source="NVIDIA RoCE documentation, MTU",
    needs=("interfaces", "rdma"),
    rdma=True,
    look=look,
)

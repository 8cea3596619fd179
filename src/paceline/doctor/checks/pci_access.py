"""PCI access control that sends traffic between devices through the processor."""

from collections.abc import Iterator

from paceline.doctor.check import Check, Found, Given
from paceline.doctor.host import Host


def look(host: Host, given: Given) -> Iterator[Found]:
    on = sorted(bridge for bridge, checked in host.bridges_checked.items() if checked)
    if on and not host.virtual and len(host.gpus) + len(host.rdma) > 1:
        yield Found(
            found=f"access control is on at {len(on)} PCI bridges: {', '.join(on[:4])}{', ...' if len(on) > 4 else ''}",
            mend=f"setpci -s {on[0]} ECAP_ACS+0x6.w=0000 for each, or disable ACS (or VT-d) in the firmware",
        )


CHECK = Check(
    id="pci-access",
    severity="warning",
    title="PCI access control is on, on bare metal",
    why="traffic between 2 devices of one switch goes up to the processor and down again, or hangs",
    mend="disable ACS in the firmware",
    source="NCCL user guide, Troubleshooting, PCI Access Control Services",
    needs=("bridges_checked", "gpus"),
    gpus=True,
    look=look,
)

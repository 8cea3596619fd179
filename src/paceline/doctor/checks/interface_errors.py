"""Interfaces that receive damaged packets."""

from collections.abc import Iterator

from paceline.doctor.check import Check, Found, Given
from paceline.doctor.host import Host

LEAST = 100
"""Fewer are what a cable does when it is plugged in."""
SHARE = 1e-6


def look(host: Host, given: Given) -> Iterator[Found]:
    for interface in host.networks():
        bad = interface.receive_errors + interface.receive_dropped
        packets = interface.receive_packets
        if bad >= LEAST and packets and bad / packets > SHARE:
            yield Found(
                found=f"{interface.name}: {interface.receive_errors} damaged and {interface.receive_dropped} missed of "
                f"{packets} packets received ({bad / packets:.1e})",
                mend=f"ethtool -S {interface.name}; replace the cable or the optic, or enlarge the ring: "
                f"ethtool -G {interface.name} rx 8192",
            )


CHECK = Check(
    id="interface-errors",
    severity="warning",
    title="An interface loses packets that it receives",
    why="TCP halves its rate at each loss: at 1 in 100,000 packets and 1 ms of delay a connection stays under 5 Gbit/s",
    mend="replace the cable or the optic",
    source="Mathis et al. 1997, The Macroscopic Behavior of the TCP Congestion Avoidance Algorithm",
    needs=("interfaces",),
    look=look,
)

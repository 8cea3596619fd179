"""Clocks that nobody keeps in step, on hosts whose records are compared."""

from collections.abc import Iterator

from paceline.doctor.check import Check, Found, Given, Skip
from paceline.doctor.host import Host


def look(host: Host, given: Given) -> Iterator[Found]:
    if not given.several:
        raise Skip("one host: no other clock to agree with")
    if host.clock is not None and host.clock.synchronised is False:
        yield Found(found="the kernel says that nothing keeps its clock in step")


CHECK = Check(
    id="clock-kept",
    severity="warning",
    title="A host's clock is kept in step by nobody",
    why="a quartz of 10 to 50 ppm drifts by 1 to 4 s a day: who was late cannot be told, leases expire early",
    mend="systemctl enable --now chronyd (or systemd-timesyncd)",
    source="ntp_adjtime(3)",
    needs=("clock",),
    look=look,
)

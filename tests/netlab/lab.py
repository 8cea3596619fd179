"""Several hosts on one machine: a network namespace per host, one more as their switch, shaped links between them.

    rack 0                      rack 1
    r0h0 ─┐                ┌─ r1h0
    r0h1 ─┴ br0 ─── core ─── br1 ┴─ r1h1        every line is a veth pair with `tc tbf` on both ends

Nothing is made outside the lab's own namespaces, so that removing these removes all of it. Their names carry the process
that made them: what a crashed one left is found and removed by the next lab (`sweep`).
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.pool.pool import Pool

PREFIX = "paceline-lab"
NAMED = Path("/run/netns")
TOOLS = ("ip", "tc", "unshare", "setpriv")
INTERFACE = "eth0"
PORT = 29400
TCP = "reno"
"""Congestion control, whatever this machine has chosen: BBR falls behind where both directions are full, and of the others
only this one may be set in every namespace."""

QUEUE_SECONDS = 0.05
SMALLEST_QUEUE_BYTES = 100_000
BURST_SECONDS = 0.001
LARGEST_PIECE_BYTES = 65_536
SMALLEST_BURST_BYTES = 10_000
"""Several frames: what a bucket of fewer bytes lets through falls behind its rate."""

_AS_HOST = "import os, socket, sys; socket.sethostname(sys.argv[1]); os.execvp(sys.argv[2], sys.argv[2:])"


class Host(NamedTuple):
    """One host of the lab: `name` is its host name, `namespace` its network."""

    name: str
    namespace: str
    address: str
    rack: int
    port: str
    """The switch's end of its link."""


class LabError(RuntimeError):
    """The lab cannot be made here, or a command of it failed."""


def refusal() -> str | None:
    """Why no lab can be made on this machine, or None."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    reason = f"{', '.join(missing)} not found" if missing else "" if os.geteuid() == 0 else "not root"
    if not reason:
        return None
    return (
        f"no lab of several hosts here: {reason}. These tests need Linux, root, iproute2 and util-linux; "
        "leave them out with -m 'not netlab' (CONTRIBUTING.md)"
    )


class Lab:
    """Hosts in racks. Leave the context, or call `close`, to end what runs on them and remove them.

    Args:
        racks: number of hosts in each rack.
        mbit: rate of every host's link in each direction, in Mbit/s of frames; None for as fast as the machine can.
        uplink_mbit: rate of each rack's link to the others; None likewise.
    """

    def __init__(
        self, racks: Sequence[int] = (2,), mbit: float | None = None, uplink_mbit: float | None = None
    ) -> None:
        if (reason := refusal()) is not None:
            raise LabError(reason)
        sweep()
        self._name = _owner_name(os.getpid())
        self._middleboxes: dict[Host, subprocess.Popen[bytes]] = {}
        self._crew: Pool | None = None
        self.switch = f"{self._name}-{_count()}-sw"
        self.hosts = [self._host(rack, slot) for rack, slots in enumerate(racks) for slot in range(slots)]
        try:
            self._build(len(racks))
            self.uplink(uplink_mbit)
            for host in self.hosts:
                self.link(host, mbit)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def link(
        self, host: Host, mbit: float | None = None, *, out: float | None = None, into: float | None = None
    ) -> None:
        """Set the rate of a host's link: `mbit` both ways, or `out` of the host and `into` it apart."""
        slower = min(out or mbit or math.inf, into or mbit or math.inf)
        # What is cut into frames late stands in line as a whole, and answers behind it.
        piece = max(SMALLEST_BURST_BYTES, min(LARGEST_PIECE_BYTES, slower * 1e6 / 8 * BURST_SECONDS))
        _ip(host.namespace, f"link set {INTERFACE} gso_max_size {round(piece)}")
        _shape(host.namespace, INTERFACE, out or mbit)
        _shape(self.switch, host.port, into or mbit)

    def uplink(self, mbit: float | None = None, *, rack: int | None = None) -> None:
        """Set the rate of a rack's link to the others, or of all of them, both ways."""
        racks = {host.rack for host in self.hosts}
        for number in racks if rack is None else {rack}:
            if len(racks) > 1:
                _shape(self.switch, f"up{number}", mbit)
                _shape(self.switch, f"down{number}", mbit)

    def cut(self, host: Host) -> None:
        """Take a host's link away: what is sent to it is lost without a word."""
        _ip(self.switch, f"link set {host.port} down")

    def mend(self, host: Host) -> None:
        """Bring a cut link back, and take away what `impair` did."""
        _ip(self.switch, f"link set {host.port} up")
        box = self._middleboxes.pop(host, None)
        if box is not None:
            box.kill()
            box.wait()
            _ip(self.switch, f"link del box-{host.port}", f"link set {host.port} master br{host.rack}")

    def impair(self, host: Host, *, delay_seconds: float = 0.0, loss: float = 0.0, seed: int = 0) -> None:
        """Delay each frame of a host's link in each direction, and lose a share `loss` of them."""
        self.mend(host)
        inside, outside = f"in-{host.port}", f"box-{host.port}"
        _ip(
            self.switch,
            f"link set {host.port} nomaster",
            f"link add {outside} type veth peer name {inside}",
            f"link set {inside} up",
            f"link set {outside} master br{host.rack} up",
        )
        script = str(Path(__file__).with_name("middlebox.py"))
        options = [host.port, inside, str(delay_seconds), str(loss), str(seed)]
        box = subprocess.Popen(
            [*_inside(self.switch), sys.executable, "-I", "-S", script, *options], stdout=subprocess.PIPE
        )
        self._middleboxes[host] = box
        assert box.stdout is not None
        if box.stdout.readline().strip() != b"ready":
            raise LabError(f"the middlebox of {host.name} ended with {box.wait()}")
        box.stdout.close()

    def prefix(self, host: Host) -> list[str]:
        """What to put before a command so that it runs on a host, under its name; it ends with this process."""
        return [*_inside(host.namespace), "unshare", "--uts", sys.executable, "-I", "-S", "-c", _AS_HOST, host.name]

    def variables(self, rank: int, hosts: Sequence[Host] | None = None) -> dict[str, str]:
        """The environment of one rank per host, as an external launcher sets it."""
        hosts = self.hosts if hosts is None else hosts
        values = {
            "RANK": rank,
            "LOCAL_RANK": 0,
            "WORLD_SIZE": len(hosts),
            "LOCAL_WORLD_SIZE": 1,
            "GROUP_RANK": rank,
            "MASTER_ADDR": hosts[0].address,
            "MASTER_PORT": PORT,
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": 1,
        }
        return {name: str(value) for name, value in values.items()}

    @property
    def crew(self) -> Pool:
        """One process on each host, kept until the lab closes: `lab.crew.run(function, len(lab.hosts), ...)`."""
        if self._crew is None:
            self._crew = Pool([self.prefix(host) for host in self.hosts], {"GLOO_SOCKET_IFNAME": INTERFACE})
        return self._crew

    def close(self) -> None:
        """End everything that runs in the lab and remove it."""
        if self._crew is not None:
            self._crew.close()
        for name in [host.namespace for host in self.hosts] + [self.switch]:
            remove(name)
        for box in self._middleboxes.values():
            box.wait()

    def _host(self, rack: int, slot: int) -> Host:
        name = f"r{rack}h{slot}"
        return Host(name, f"{self.switch[:-3]}-{name}", f"10.77.{rack}.{slot + 1}", rack, f"p{rack}-{slot}")

    def _build(self, racks: int) -> None:
        for name in [self.switch, *(host.namespace for host in self.hosts)]:
            _run(["ip", "netns", "add", name])
        lines = [f"link add {bridge} type bridge" for bridge in ["core", *(f"br{rack}" for rack in range(racks))]]
        for rack in range(racks if racks > 1 else 0):
            lines += [
                f"link add up{rack} type veth peer name down{rack}",
                f"link set up{rack} master br{rack} up",
                f"link set down{rack} master core up",
            ]
        for host in self.hosts:
            lines += [
                f"link add {host.port} type veth peer name {INTERFACE} netns {host.namespace}",
                f"link set {host.port} master br{host.rack} up",
            ]
        _ip(self.switch, *lines, "link set core up", *(f"link set br{rack} up" for rack in range(racks)))
        for host in self.hosts:
            _run(["ip", "netns", "exec", host.namespace, "tee", "/proc/sys/net/ipv4/tcp_congestion_control"], TCP)
            address = f"addr add {host.address}/16 dev {INTERFACE}"
            _ip(host.namespace, address, f"link set {INTERFACE} up", "link set lo up")


def sweep() -> list[str]:
    """Remove the labs of processes that are gone; returns the namespaces that were left."""
    names = sorted(path.name for path in NAMED.glob(f"{PREFIX}-*")) if NAMED.is_dir() else []
    left = [name for name in names if not _owner_lives(name)]
    for name in left:
        remove(name)
    return left


def remove(namespace: str) -> None:
    """End the processes of a namespace and remove it; no error where it is not there."""
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
        pids = [int(word) for word in listed.stdout.split()]
        if not pids:
            break
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


_made = 0


def _count() -> int:
    global _made
    _made += 1
    return _made


def _owner_name(pid: int) -> str:
    return f"{PREFIX}-{pid}-{_started_at(pid)}"


def _started_at(pid: int) -> str:
    """When a process began, in clock ticks: a process number comes back, this with it does not. Empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _owner_lives(name: str) -> bool:
    pid, started = name.removeprefix(f"{PREFIX}-").split("-")[:2]
    return pid.isdigit() and _started_at(int(pid)) == started


def _inside(namespace: str) -> list[str]:
    return ["setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", namespace]


def _shape(namespace: str, device: str, mbit: float | None) -> None:
    """Limit what leaves by a device. A rate counts whole frames: TCP's payload has about 95.6% of it."""
    if mbit is None:
        subprocess.run(["tc", "-n", namespace, "qdisc", "del", "dev", device, "root"], capture_output=True, check=False)
        return
    bytes_per_second = mbit * 1e6 / 8
    burst = max(SMALLEST_BURST_BYTES, round(BURST_SECONDS * bytes_per_second))
    queue = max(SMALLEST_QUEUE_BYTES, round(QUEUE_SECONDS * bytes_per_second)) + burst
    limits = f"rate {round(mbit * 1000)}kbit burst {burst} limit {queue}"
    _run(["tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", *limits.split()])


def _ip(namespace: str, *lines: str) -> None:
    _run(["ip", "-n", namespace, "-batch", "-"], "\n".join(lines))


def _run(command: Sequence[str], text: str = "") -> None:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LabError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}\n{text}")

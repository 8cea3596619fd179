"""Interfaces, names, other hosts and ports, from the kernel and the resolver."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import threading
import time
from pathlib import Path

from paceline.doctor.capture import files
from paceline.doctor.host import Interface, Names, Peer, Port
from paceline.workers import ports

NETWORK = Path("/sys/class/net")
KINDS = {"772": "loopback", "32": "infiniband"}
RESOLVE_SECONDS = 4.0
CONNECT_SECONDS = 2.0
_SIOCGIFADDR = 0x8915


def interfaces() -> tuple[Interface, ...]:
    """Network interfaces with their kind, rate, addresses and error counts.

    Raises:
        NotThere: the kernel does not list them.
    """
    listed = files.folders(NETWORK)
    if not listed:
        raise files.NotThere(f"{NETWORK} is not there")
    six = _ipv6()
    return tuple(_interface(folder, six.get(folder.name, ())) for folder in listed if (folder / "mtu").exists())


def _interface(folder: Path, six: tuple[str, ...]) -> Interface:
    speed = files.number(folder / "speed")
    four = _ipv4(folder.name)
    statistics = folder / "statistics"
    return Interface(
        name=folder.name,
        kind=_kind(folder),
        up=bool((files.number(folder / "carrier") or 0) == 1 and files.text(folder / "operstate") in ("up", "unknown")),
        mtu=files.number(folder / "mtu") or 0,
        speed=speed * 1e6 if speed and speed > 0 else None,
        addresses=(*((four,) if four else ()), *six),
        receive_packets=files.number(statistics / "rx_packets") or 0,
        receive_errors=files.number(statistics / "rx_errors") or 0,
        receive_dropped=files.number(statistics / "rx_missed_errors") or 0,
    )


def _kind(folder: Path) -> str:
    kind = KINDS.get(files.text(folder / "type"))
    if kind:
        return kind
    if (folder / "bonding").is_dir():
        return "bond"
    if (folder / "bridge").is_dir():
        # A bridge with a card among its ports is the host's way out, one without is its containers' own.
        return "ethernet" if any((port.resolve() / "device").exists() for port in _ports(folder)) else "bridge"
    if (folder / "device").exists():
        return "ethernet"
    if (folder / "brport").exists():
        return "veth"
    return "vlan" if "." in folder.name else _virtual(folder)


def _ports(bridge: Path) -> list[Path]:
    return [bridge.parent / port.name for port in files.folders(bridge / "brif")]


def _virtual(folder: Path) -> str:
    """A container's own eth0 is one end of a pair, and its way to other hosts."""
    paired = files.text(folder / "iflink") not in ("", files.text(folder / "ifindex"))
    return "ethernet" if paired or folder.name.startswith(("eth", "en")) else "virtual"


def _ipv4(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        try:
            answer = fcntl.ioctl(handle.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def _ipv6() -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for line in files.text("/proc/net/if_inet6").splitlines():
        digits, *_, name = line.split()
        found[name] = (*found.get(name, ()), socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found


def names() -> Names:
    """This host's own name as it resolves here."""
    host = socket.gethostname()
    addresses, seconds, _ = resolve(host)
    return Names(host=host, qualified=host, addresses=addresses, seconds=seconds)


def resolve(name: str, seconds: float = RESOLVE_SECONDS) -> tuple[tuple[str, ...], float, str]:
    """Addresses of a name, how long it took, and why there are none. Gives up after `seconds`: resolvers wait for minutes."""
    found: list[str] = []
    failed: list[str] = []

    def look() -> None:
        try:
            found.extend(dict.fromkeys(str(entry[4][0]) for entry in socket.getaddrinfo(name, None)))
        except OSError as error:
            failed.append(error.strerror or str(error))

    began = time.monotonic()
    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(seconds)
    late = f"no answer within {seconds:g} s" if thread.is_alive() else ""
    return tuple(found), time.monotonic() - began, failed[0] if failed else late


def peers(wanted: tuple[str, ...]) -> tuple[Peer, ...]:
    """Other hosts, `name` or `name:port`: what they resolve to, and whether the port answers."""
    return tuple(_peer(text) for text in wanted)


def _peer(text: str) -> Peer:
    name, _, digits = text.partition(":")
    port = int(digits) if digits.isdigit() else None
    addresses, seconds, reason = resolve(name)
    if not addresses or port is None:
        return Peer(name=name, port=port, address=addresses[0] if addresses else "", seconds=seconds, reason=reason)
    began = time.monotonic()
    try:
        socket.create_connection((addresses[0], port), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
    return Peer(
        name=name,
        port=port,
        address=addresses[0],
        reachable=not reason,
        seconds=time.monotonic() - began,
        reason=reason,
    )


def port(number: int | None) -> Port | None:
    """A port that a run would listen on; None where none is named, so that a run takes a free one."""
    if number is None:
        return None
    low, high = (int(n) for n in (files.text("/proc/sys/net/ipv4/ip_local_port_range") or "32768 60999").split())
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", number))
        except OSError:
            pid = ports.holder(number)
            return Port(number=number, free=False, holder=f"process {pid}" if pid else "", low=low, high=high)
    return Port(number=number, free=True, low=low, high=high)

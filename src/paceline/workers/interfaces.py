"""Which network interface the ranks of this host speak through, and whether the variables that name one make sense.

Imports no torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from paceline.errors import JobError

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_UP = 0x1  # IFF_UP of linux/if.h
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of linux/sockios.h


class Interface(NamedTuple):
    """A network interface of this host; `address` is its IPv4 address, "" where it has none."""

    name: str
    up: bool
    loopback: bool
    address: str = ""


def interfaces() -> list[Interface]:
    """Those of this host, or of the network namespace that this process is in."""
    return [_interface(name) for _, name in socket.if_nameindex()]


class Named(Protocol):
    """Whatever stands for an interface."""

    @property
    def name(self) -> str: ...


AnyInterface = TypeVar("AnyInterface", bound=Named)


def selected(variable: str, value: str, table: Sequence[AnyInterface]) -> list[AnyInterface]:
    """What a value of `GLOO_SOCKET_IFNAME` or `NCCL_SOCKET_IFNAME` selects.

    Gloo takes exact names. NCCL takes prefixes; `=` before them makes them exact, `^` selects what matches none (NCCL user
    guide, environment variables).
    """
    words = [word.strip() for word in value.lstrip("^=").split(",") if word.strip()]
    if variable == GLOO:
        return [one for one in table if one.name in [word.strip() for word in value.split(",")]]
    is_excluding = value.startswith("^")
    is_exact = value.removeprefix("^").startswith("=")

    def matches(one: AnyInterface) -> bool:
        return any(one.name == word if is_exact else one.name.startswith(word) for word in words)

    return [one for one in table if matches(one) != is_excluding]


def check_interfaces(
    env: Mapping[str, str], several_hosts: bool, variables: Sequence[str], table: Sequence[Interface] | None = None
) -> list[str]:
    """Refuse a variable that cannot work on this host, before ranks wait for each other.

    Args:
        env: where the variables stand.
        several_hosts: whether ranks of other hosts take part.
        variables: those that have an effect in this run.
        table: the host's interfaces, unless they are to be looked up.

    Returns:
        Warnings.

    Raises:
        JobError: a variable selects no interface, or none that is up, or a loopback by its name between hosts.
    """
    notes = []
    for variable in variables:
        value = env.get(variable, "").strip()
        if not value:
            continue
        table = interfaces() if table is None else table
        found = [one for one in selected(variable, value, table) if one.up]
        if not found:
            raise _unusable(variable, value, table)
        if several_hosts and all(one.loopback for one in found):
            if not value.startswith("^"):
                raise _loopback(variable, value, table)
            notes.append(
                f"warning: {variable}={value} leaves only {found[0].name}, the loopback, which other hosts cannot reach"
            )
    return notes


def route_interface(host: str, port: int) -> Interface | None:
    """The interface by which this host reaches `host`; None where it is a loopback, or cannot be told."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        # No packet is sent: the kernel only chooses the way.
        way.connect((socket.gethostbyname(host), port))
        own = way.getsockname()[0]
        return next((one for one in interfaces() if one.address == own and not one.loopback), None)
    return None


def is_own_address(host: str) -> bool:
    """Whether a name or address is one of this host's, whatever it is called: only then can a socket be bound to it."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        return False
    return any(_can_bind(family, address) for family, _, _, _, address in found)


def _can_bind(family: int, address: tuple[Any, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def _interface(name: str) -> Interface:
    try:
        flags = int(Path(f"/sys/class/net/{name}/flags").read_text(), 16)
    except (OSError, ValueError):
        flags = _UP
    is_loopback = name in ("lo", "lo0") or bool(flags & 0x8)  # IFF_LOOPBACK
    return Interface(name, bool(flags & _UP), is_loopback, _address(name))


def _address(name: str) -> str:
    if sys.platform != "linux":
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        try:
            answer = fcntl.ioctl(handle, _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def _listed(table: Sequence[Interface]) -> str:
    return ", ".join(f"{one.name}{'' if one.up else ' (down)'}" for one in table) or "none"


def _unusable(variable: str, value: str, table: Sequence[Interface]) -> JobError:
    down = [one.name for one in selected(variable, value, table)]
    what = f"{', '.join(down)}, which is down" if down else "no interface of this host"
    return JobError(
        f"{variable}={value} selects {what}; there are {_listed(table)}",
        key=variable,
        values={"value": value, "interfaces": [one.name for one in table]},
        hint=f"Unset {variable}, or name one of these.",
    )


def _loopback(variable: str, value: str, table: Sequence[Interface]) -> JobError:
    others = [one for one in table if one.up and not one.loopback]
    return JobError(
        f"{variable}={value} is the loopback of this host, which the ranks of other hosts cannot reach",
        key=variable,
        values={"value": value, "interfaces": [one.name for one in table]},
        hint=f"Unset {variable}, or name one of {_listed(others)}.",
    )

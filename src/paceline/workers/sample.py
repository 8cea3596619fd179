"""What the system says of a worker and its helpers, without their help: states, processor time, what the kernel waits in.

Linux; elsewhere every sample is empty, and verdicts go by beats and stacks alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from paceline.workers import processes

_TICKS = os.sysconf("SC_CLK_TCK")
_HELPERS = (
    (re.compile(rb"-m\0paceline\.data\.worker\0\d+\0(\d+)"), "loader worker {}"),
    (re.compile(rb"-m\0paceline\.checkpoint\.writer\0"), "checkpoint writer"),
)
GONE = "gone"
_RETRANSMITTING = "01"
"""The timer of a line of /proc/net/tcp: something was sent and not acknowledged."""


class Sample(NamedTuple):
    """Of one process. `state` is the kernel's letter ("" where unknown), `main_state` that of its main thread; times are
    seconds of processor time so far; `waits_in` the kernel's function that the main thread sleeps in."""

    pid: int
    state: str = ""
    main_state: str = ""
    main_cpu_seconds: float = 0.0
    cpu_seconds: float = 0.0
    waits_in: str = ""


class Helper(NamedTuple):
    """A process that a worker has started."""

    name: str
    sample: Sample
    stack: str = ""


class Connection(NamedTuple):
    """A TCP connection of a rank that what was sent on is not acknowledged: peer address, port, bytes, resent so often."""

    address: str
    port: int
    unsent_bytes: int
    resent: int


def sample(pid: int) -> Sample:
    """Of a process now."""
    whole, main = processes.stat_fields(pid), processes.stat_fields(pid, thread=pid)
    if not whole or not main:
        return Sample(pid, GONE if processes.LINUX else "")
    return Sample(pid, whole[0], main[0], _cpu(main), _cpu(whole), _text(f"/proc/{pid}/wchan").strip("0\n"))


def helpers(pid: int) -> list[Helper]:
    """The processes below a worker, by name."""
    found = []
    for child in processes.descendants(pid)[1:]:
        words = _bytes(f"/proc/{child}/cmdline")
        named = [
            name.format(*(m.group(1).decode(),) if m.groups() else ()) for p, name in _HELPERS if (m := p.search(words))
        ]
        name = named[0] if named else _text(f"/proc/{child}/comm").strip() or "process"
        found.append(Helper(name, sample(child)))
    return found


def unacknowledged(pid: int) -> list[Connection]:
    """Connections of a process whose peer does not answer."""
    own = _sockets(pid)
    found = []
    for name in ("tcp", "tcp6"):
        for line in _text(f"/proc/{pid}/net/{name}").splitlines()[1:]:
            fields = line.split()
            if fields[9] not in own or fields[3] != "01":
                continue
            waiting, timer, resent = (
                int(fields[4].partition(":")[0], 16),
                fields[5].partition(":")[0],
                int(fields[6], 16),
            )
            if timer == _RETRANSMITTING and resent > 0:
                address, _, port = fields[2].partition(":")
                found.append(Connection(_address(address), int(port, 16), waiting, resent))
    return found


def own_addresses(pid: int) -> set[str]:
    """The addresses that a process's connections begin at."""
    own = _sockets(pid)
    lines = [line.split() for name in ("tcp", "tcp6") for line in _text(f"/proc/{pid}/net/{name}").splitlines()[1:]]
    return {_address(fields[1].partition(":")[0]) for fields in lines if fields[9] in own and fields[3] == "01"}


def _sockets(pid: int) -> set[str]:
    """Inodes of a process's sockets."""
    found = set()
    try:
        for entry in os.scandir(f"/proc/{pid}/fd"):
            target = str(Path(entry.path).readlink())
            if target.startswith("socket:["):
                found.add(target[8:-1])
    except OSError:
        return found
    return found


def _address(text: str) -> str:
    """Dotted address of the kernel's hexadecimal one: words of four bytes, each with its last byte first."""
    words = [bytes.fromhex(text[i : i + 8])[::-1] for i in range(0, len(text), 8)]
    if len(words) == 4 and words[:3] in ([bytes(4)] * 3, [bytes(4), bytes(4), b"\0\0\xff\xff"]):
        words = words[3:]
    if len(words) == 1:
        return ".".join(map(str, words[0]))
    return ":".join(b"".join(words)[i : i + 2].hex() for i in range(0, 16, 2))


def _cpu(fields: Sequence[str]) -> float:
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _text(path: str) -> str:
    return _bytes(path).decode(errors="replace")


def _bytes(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""

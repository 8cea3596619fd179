"""The port where workers meet: bound once by the supervisor, so that two jobs can never choose the same one."""

from __future__ import annotations

import errno
import socket
import sys
from pathlib import Path

from paceline.errors import JobError

LOOPBACK = "127.0.0.1"
_BACKLOG = 2048


def listen(port: int | None = None, host: str = LOOPBACK) -> socket.socket:
    """A listening socket on `port`, or on a free one.

    Raises:
        JobError: the port is taken; names the process that holds it where that is visible.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port or 0))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE and port is not None:
            raise port_in_use(port) from None
        raise JobError(
            f"cannot listen on {host} port {port or 'any'}: {error.strerror}",
            key="launch.port",
            values={"port": port},
            hint='Choose a port above 1023, or launch.port = "auto".',
        ) from None
    return listener


def port_in_use(port: int) -> JobError:
    """The error for a taken port."""
    pid = holder(port)
    name = f" by process {pid} ({_command(pid)})" if pid else ", by a process that this user cannot see"
    return JobError(
        f"port {port} is already in use{name}",
        key="launch.port",
        values={"port": port, "pid": pid},
        hint='End that process, or set launch.port = "auto" to be given a free one.',
    )


def holder(port: int) -> int | None:
    """The process that listens on a TCP port of this host, or None where it is not visible (Linux)."""
    if sys.platform != "linux":
        return None
    inodes = {inode for table in ("tcp", "tcp6") for inode in _listening_inodes(Path(f"/proc/net/{table}"), port)}
    targets = {f"socket:[{inode}]" for inode in inodes}
    if not targets:
        return None
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if any(str(fd.readlink()) in targets for fd in (folder / "fd").iterdir()):
                return int(folder.name)
        except OSError:
            continue
    return None


def _listening_inodes(table: Path, port: int) -> list[str]:
    listening = "0A"
    try:
        rows = [line.split() for line in table.read_text().splitlines()[1:]]
    except OSError:
        return []
    return [row[9] for row in rows if row[3] == listening and int(row[1].rpartition(":")[2], 16) == port]


def _command(pid: int | None) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "unknown"
    return b" ".join(words).decode(errors="replace").strip()[:80]

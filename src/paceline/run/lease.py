"""One live run per directory: a lease file that says who holds it, and whose modification time is the heartbeat.

On the same host (same process namespace) the process itself is the proof: alive means held, gone means free. From
another host only the heartbeat can be seen: one older than `EXPIRES_SECONDS` means free. The two clocks are then
compared, so hosts that share a run directory need theirs set (NTP).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from paceline.errors import RunHeld
from paceline.run.files import write_atomic
from paceline.units import format_seconds

EXPIRES_SECONDS = 60.0
"""A holder on another host whose heartbeat is older than this is taken for dead. It beats twelve times as often."""
BEATS = 12
"""Beats in that time. A holder that was itself stopped for so long learns with the next one whether it was taken over."""


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds a run directory. `process_start` tells a process from a later one with its pid."""

    host: str
    namespace: str
    pid: int
    process_start: str
    attempt: int
    since: float
    token: str


class Lease:
    """A held lease; it beats in a thread until `release`.

    Attributes:
        lost: a beat has found that another holder took it: it must not be kept alive, nor must its run.
    """

    def __init__(self, path: Path, holder: Holder, beat_seconds: float) -> None:
        self.path = path
        self.holder = holder
        self.lost = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, args=(beat_seconds,), name="lease", daemon=True)
        self._thread.start()

    def is_ours(self) -> bool:
        """Whether the file still names this holder: another host may have taken a lease whose heartbeat had stopped."""
        found = read_holder(self.path)
        return found is not None and found.token == self.holder.token

    def renew(self, attempt: int) -> None:
        """Write a new attempt number into the lease."""
        self.holder = msgspec.structs.replace(self.holder, attempt=attempt)
        write_atomic(self.path, msgspec.json.encode(self.holder))

    def release(self) -> None:
        """Stop beating and remove the file, if it is still ours. Releasing twice is harmless."""
        self._stop.set()
        self._thread.join()
        if self.is_ours():
            self.path.unlink(missing_ok=True)

    def _beat(self, seconds: float) -> None:
        while not self.lost and not self._stop.wait(seconds):
            found = read_holder(self.path)
            # One that cannot be read may be a file system that is away for a moment.
            self.lost = found is not None and found.token != self.holder.token
            if not self.lost:
                with contextlib.suppress(OSError):
                    os.utime(self.path)


def acquire(path: Path, attempt: int, *, expires_seconds: float = EXPIRES_SECONDS) -> tuple[Lease, str | None]:
    """The lease at `path`, and a sentence about the dead holder it was taken from, if there was one.

    Call it inside `exclusive`.

    Raises:
        RunHeld: the holder lives; host, pid and since when.
    """
    found = read_holder(path)
    taken = None
    if found is not None:
        reason = why_dead(path, found, expires_seconds)
        if reason is None:
            raise held(path, found)
        taken = f"took over {path.parent} from pid {found.pid} on {found.host} (attempt {found.attempt}): {reason}"
    holder = Holder(
        host=os.uname().nodename,
        namespace=_namespace(),
        pid=os.getpid(),
        process_start=_process_start(os.getpid()) or "",
        attempt=max(attempt, found.attempt + 1 if found else 0),
        since=time.time(),
        token=os.urandom(8).hex(),
    )
    write_atomic(path, msgspec.json.encode(holder))
    return Lease(path, holder, expires_seconds / BEATS), taken


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Let one process at a time look at a lease and take it. A file system without locks gives no such protection."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def read_holder(path: Path) -> Holder | None:
    """The holder that the lease file names; None where there is no readable lease."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Holder)
    except (OSError, msgspec.DecodeError):
        return None


def why_dead(path: Path, holder: Holder, expires_seconds: float = EXPIRES_SECONDS) -> str | None:
    """Why the holder counts as dead; None while it lives."""
    if _is_here(holder):
        start = _process_start(holder.pid)
        return None if start is not None and start == holder.process_start else "that process is gone"
    try:
        silent_seconds = time.time() - path.stat().st_mtime
    except OSError:
        return "its lease is gone"
    if silent_seconds <= expires_seconds:
        return None
    return f"no heartbeat for {format_seconds(silent_seconds)} (limit {format_seconds(expires_seconds)})"


def held(path: Path, holder: Holder, expires_seconds: float = EXPIRES_SECONDS) -> RunHeld:
    """The error for a directory whose holder lives."""
    beat = ""
    if not _is_here(holder):
        with contextlib.suppress(OSError):
            silent = format_seconds(max(0.0, time.time() - path.stat().st_mtime))
            beat = (
                f"; its last heartbeat is {silent} old, and it counts as dead after {format_seconds(expires_seconds)}"
            )
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.since))
    return RunHeld(
        f"{path.parent} is held by pid {holder.pid} on {holder.host} since {since} (attempt {holder.attempt}){beat}",
        key="run.name",
        values={"directory": str(path.parent), "host": holder.host, "pid": holder.pid, "since": holder.since,
                "attempt": holder.attempt},
        hint=f"Wait for it, end it with Ctrl-C or `kill {holder.pid}` on its host, or give this run another run.name.",
    )  # fmt: skip


def _is_here(holder: Holder) -> bool:
    """Whether its process would be visible to this one."""
    return (holder.host, holder.namespace) == (os.uname().nodename, _namespace())


def _namespace() -> str:
    """Names the set of processes in which a pid means something: boot and pid namespace (containers have their own)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _process_start(pid: int) -> str | None:
    """When a living process started, as an opaque text; None for one that is gone or a zombie."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in "ZX" else rest[18]
    except (FileNotFoundError, ProcessLookupError):
        if Path("/proc/self/stat").exists():
            return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return "unknown"

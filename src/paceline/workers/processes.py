"""A command with all that it starts, and an end for all of it at once. Linux and macOS."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from paceline.errors import PacelineError
from paceline.workers import environment

LINUX = sys.platform == "linux"

GONE_SECONDS = 20.0
"""Longest time that a killed process takes to go; one in an uninterruptible wait takes as long as that."""

_TIED = """
import runpy, sys
from paceline.workers.lifeline import die_with_parent
die_with_parent(int(sys.argv.pop(1)))
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
"""`python -m MODULE` that does not outlive whoever started it."""


@contextlib.contextmanager
def started(
    words: Sequence[str], out: Path, log: Path, *, module: str = "paceline", env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m MODULE WORDS` in a session of its own, stdout into `out` and stderr into `log`. Nothing of it stays.

    Args:
        env: variables beside those of this process.
    """
    hidden = {*environment.OWN, *environment.TORCHRUN}
    inherited = {k: v for k, v in os.environ.items() if k not in hidden and not k.startswith(environment.ELASTIC)}
    with out.open("wb") as stdout, log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-c", _TIED, str(os.getpid()), module, *words], stdin=subprocess.DEVNULL, stdout=stdout,
            stderr=stderr, start_new_session=True, env={**inherited, **(env or {})},
        )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            kill_all(process)


def kill_all(process: subprocess.Popen[bytes]) -> int:
    """SIGKILL to a process and all that descends from it, the parents first; returns how many there were.

    Raises:
        PacelineError: one of them did not go.
    """
    tree = descendants(process.pid)
    end(tree)
    process.wait()
    deadline = time.monotonic() + GONE_SECONDS
    while left := [pid for pid in tree if pid != process.pid and _lives(pid)]:
        if time.monotonic() > deadline:
            raise PacelineError(
                f"processes {', '.join(map(str, left))} are still there {GONE_SECONDS:.0f} s after SIGKILL",
                values={"pids": left},
                hint="They wait for a device or a file system; see `ps -o pid,stat,wchan`.",
            )
        time.sleep(0.01)
    return len(tree)


def end(pids: Sequence[int]) -> None:
    """SIGKILL to processes, as far as they are there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def carrying(*texts: bytes) -> list[int]:
    """Processes whose environment holds all of these texts; none are seen where the system does not show environments."""
    found = []
    for pid, _ in _pairs():
        with contextlib.suppress(OSError):
            environment_of = Path(f"/proc/{pid}/environ").read_bytes()
            if all(text in environment_of for text in texts):
                found.append(pid)
    return found


def descendants(pid: int) -> list[int]:
    """A process and all that descends from it, each after its parent."""
    children: dict[int, list[int]] = {}
    for child, parent in _pairs():
        children.setdefault(parent, []).append(child)
    found = [pid]
    for parent in found:
        found += children.get(parent, [])
    return found


def _pairs() -> Iterator[tuple[int, int]]:
    """(pid, parent) of all processes that can be seen."""
    if not LINUX:
        listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
        for line in listed.splitlines():
            pid, parent = line.split()
            yield int(pid), int(parent)
        return
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and (fields := stat_fields(int(entry.name))):
            yield int(entry.name), int(fields[1])


def _lives(pid: int) -> bool:
    """Whether a process is there and more than an exit code that nobody has fetched."""
    if LINUX:
        fields = stat_fields(pid)
        return bool(fields) and fields[0] not in ("Z", "X")
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def stat_fields(pid: int, thread: int | None = None) -> list[str]:
    """State, parent and so on of a process or of one thread of it; the command's name before them may hold spaces."""
    try:
        return (
            Path(f"/proc/{pid}/stat" if thread is None else f"/proc/{pid}/task/{thread}/stat")
            .read_text()
            .rpartition(")")[2]
            .split()
        )
    except OSError:
        return []

"""What /proc tells about processes: their state, and which carry a variable in their environment."""

from __future__ import annotations

import os
import signal
from pathlib import Path

_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in uninterruptible sleep",
    "T": "stopped",
    "t": "traced",
    "Z": "zombie",
}


def process_state(pid: int) -> str:
    """`T (stopped)`, `S (sleeping)`, or `gone`."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "gone"
    letter = stat.rpartition(")")[2].split()[0]
    return f"{letter} ({_STATES.get(letter, 'unknown')})"


def exit_reason(returncode: int) -> str:
    if returncode < 0:
        return f"was killed by signal {-returncode} ({signal.Signals(-returncode).name})"
    return f"exited with code {returncode}"


def carrying(variable: str, value: str) -> dict[int, str]:
    """Live processes other than this one that have `variable=value` in their environment: command line by pid."""
    entry = f"{variable}={value}".encode()
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
        if entry in environment and int(folder.name) != os.getpid():
            found[int(folder.name)] = command
    return found


def environment(pid: int) -> dict[str, str]:
    """The variables that a process was started with; none where it is gone."""
    try:
        pairs = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return {name: value for name, _, value in (pair.partition("=") for pair in pairs if pair)}

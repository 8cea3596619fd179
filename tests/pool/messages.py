"""What the pool and its worker processes send each other."""

from __future__ import annotations

import signal
from typing import NamedTuple

STACK_SIGNAL = signal.SIGUSR1


class Call(NamedTuple):
    """One function call on one rank. `payload` is the pickled arguments, `path` the parent's `sys.path`."""

    module: str
    file: str
    qualname: str
    payload: bytes
    rank: int
    world_size: int
    store_file: str
    collective_timeout: float
    env: dict[str, str]
    path: list[str]
    group: bool


class Outcome(NamedTuple):
    """What became of a call: `payload` is the pickled result, or the pickled exception (empty if it has no pickle)."""

    ok: bool
    time: float
    payload: bytes
    traceback: str

"""Waiting on the host, over the store: for phases that may drift further apart than a collective's timeout."""

from __future__ import annotations

import time
from typing import Protocol

from paceline.errors import Stalled
from paceline.units import format_seconds
from paceline.workers import heartbeat

_FIRST_PAUSE_SECONDS = 0.001
_LONGEST_PAUSE_SECONDS = 0.05


class KeyValueStore(Protocol):
    """The part of torch's `Store` that a barrier needs."""

    def set(self, key: str, value: str, /) -> None: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...


def store_barrier(store: KeyValueStore, name: str, rank: int, world_size: int, timeout: float) -> None:
    """Return once all ranks have called it with this name. Each name serves once.

    Rank 0, which may host the store, returns last, so that it can end the process right after.

    Args:
        timeout: seconds; the stall watchdog does not count the wait.

    Raises:
        Stalled: the time is over; names the ranks that did not come.
    """
    if world_size == 1:
        return
    with heartbeat.waiting(f"waiting for all ranks ({name})"):
        _meet(store, name, rank, world_size, timeout)


def _meet(store: KeyValueStore, name: str, rank: int, world_size: int, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    store.set(f"{name}/rank-{rank}", "here")
    if store.add(f"{name}/arrived", 1) == world_size:
        store.set(f"{name}/go", "go")
    if not _wait(store, f"{name}/go", deadline):
        missing = [r for r in range(world_size) if not store.check([f"{name}/rank-{r}"])]
        raise Stalled(
            f"waited {format_seconds(timeout)} at {name!r} for ranks {', '.join(map(str, missing))}",
            values={"barrier": name, "ranks": missing, "seconds": timeout},
            hint="Look at what these ranks printed last.",
        )
    if store.add(f"{name}/left", 1) == world_size:
        store.set(f"{name}/all-left", "yes")
    if rank == 0:
        _wait(store, f"{name}/all-left", time.monotonic() + min(timeout, 10.0))


def _wait(store: KeyValueStore, key: str, deadline: float) -> bool:
    """Polls: torch's own `wait` writes warnings whenever a slice of it passes, and cannot be interrupted."""
    pause = _FIRST_PAUSE_SECONDS
    while not store.check([key]):
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
    return True

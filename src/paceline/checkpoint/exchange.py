"""What ranks tell each other over the run's store: no collective, so that it can happen beside training. No torch."""

from __future__ import annotations

import hashlib
import time
import zlib
from collections.abc import Sequence
from typing import Protocol

import msgspec

from paceline.checkpoint.piece_file import NewPiece
from paceline.errors import Stalled
from paceline.units import format_seconds

_FIRST_PAUSE_SECONDS = 0.001
_LONGEST_PAUSE_SECONDS = 0.05


class KeyValueStore(Protocol):
    """The part of torch's `Store` that is needed."""

    def set(self, key: str, value: str | bytes, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...


def await_key(store: KeyValueStore, key: str, timeout: float, what: str) -> bytes:
    """The value of a key, as soon as it is there.

    Raises:
        Stalled: it did not come in time.
    """
    deadline, pause = time.monotonic() + timeout, _FIRST_PAUSE_SECONDS
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise Stalled(
                f"waited {format_seconds(timeout)} for {what}",
                key="checkpoint.storage_timeout",
                values={"seconds": timeout, "key": key},
            )
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
    return store.get(key)


def share_held(
    store: KeyValueStore, prefix: str, rank: int, world_size: int, mine: Sequence[NewPiece], timeout: float
) -> list[list[NewPiece]]:
    """What every rank holds. Lists that several ranks have alike go through the store once.

    Raises:
        Stalled: a rank did not say in time.
    """
    encoded = msgspec.json.encode(mine)
    digest = hashlib.sha256(encoded).hexdigest()
    store.set(f"{prefix}/held/{digest}", zlib.compress(encoded, 1))
    store.set(f"{prefix}/holds/{rank}", digest)
    lists: dict[str, list[NewPiece]] = {digest: list(mine)}
    everyone = []
    for other in range(world_size):
        theirs = await_key(store, f"{prefix}/holds/{other}", timeout, f"rank {other} to say what it holds").decode()
        if theirs not in lists:
            lists[theirs] = msgspec.json.decode(
                zlib.decompress(store.get(f"{prefix}/held/{theirs}")), type=list[NewPiece]
            )
        everyone.append(lists[theirs])
    return everyone

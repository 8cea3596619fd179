"""What becomes of a save on other hosts, told through the run's store: writers do not know the store, their ranks do.

Rank 0 says what a save came to (`result`); the local rank 0 of any other host says that it failed there (`trouble`), so
that nobody waits for its files. No torch.
"""

from __future__ import annotations

import time

import msgspec

from paceline.checkpoint.exchange import KeyValueStore
from paceline.checkpoint.host_link import WorldLike
from paceline.checkpoint.messages import Event

PAUSE_SECONDS = 0.1
"""Between two looks at the store."""


class OtherHosts:
    """This rank's word to and from other hosts. With one host there are none, and nothing is looked at."""

    def __init__(self, world: WorldLike, store: KeyValueStore, prefix: str) -> None:
        self.count = world.world_size // world.local_world_size - 1
        self._store = store
        self._prefix = prefix
        self._is_first = world.rank == 0
        self._is_messenger = self.count > 0 and world.local_rank == 0
        self._looked = 0.0

    def tell(self, event: Event) -> None:
        """Say what save `event.number` came to on this host."""
        if not self._is_messenger:
            return
        if self._is_first or event.state == "failed":
            key = self._key("result" if self._is_first else "trouble", event.number)
            self._store.set(key, msgspec.json.encode(event))

    def ended(self, number: int) -> Event | None:
        """How the save, which this host still works on, has ended elsewhere; None where it goes on or is not yet known."""
        now = time.monotonic()
        if not self._is_messenger or now - self._looked < PAUSE_SECONDS:
            return None
        self._looked = now
        return self._read(self._key("trouble" if self._is_first else "result", number))

    def result(self, number: int) -> Event | None:
        """What the save came to in the end; None where that is not known yet."""
        return self._read(self._key("result", number))

    def _key(self, what: str, number: int) -> str:
        return f"{self._prefix}/{what}/{number}"

    def _read(self, key: str) -> Event | None:
        return msgspec.json.decode(self._store.get(key), type=Event) if self._store.check([key]) else None

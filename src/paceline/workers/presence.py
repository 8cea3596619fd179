"""Which nodes of an attempt give signs of life: told and read by a thread, so that nothing else waits for a host that is
gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from paceline.errors import Stalled
from paceline.workers.nodes import STORE_SECONDS, Party

BEAT_SECONDS = 0.5
GAP_SECONDS = 2.0


class Presence:
    """Signs of life of the nodes of one attempt, as long as the `with` lasts.

    Args:
        waiting: how many nodes wait at the door.
        lost: the error where the store of the endpoint's host does not answer.
        gone_seconds: silence after which a node counts as gone.

    Attributes:
        at_the_door: nodes that wait to be let in, as last counted.
    """

    def __init__(
        self, party: Party, waiting: Callable[[], int], lost: Callable[[], Stalled], gone_seconds: float
    ) -> None:
        self._party, self._waiting, self._lost, self._gone_seconds = party, waiting, lost, gone_seconds
        self._others = [rank for rank in range(party.nodes) if rank != party.node_rank]
        now = time.monotonic()
        self._seen = dict.fromkeys(self._others, ("", now))
        self._ended: dict[int, float] = {}
        self._answered = self._checked = now
        self._is_lost = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="presence", daemon=True)
        self.at_the_door = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()

    def check(self) -> None:
        """Make sure that the nodes can still speak with each other. To be called some times a second.

        Raises:
            Stalled: the host of the endpoint is gone.
        """
        now = time.monotonic()
        gap, self._checked = now - self._checked, now
        if gap > GAP_SECONDS:
            # This process itself did not run: that nobody was heard meanwhile says nothing.
            self._answered = max(self._answered, now)
        if self._is_lost or now - self._answered > STORE_SECONDS:
            raise self._lost()

    def gone(self) -> list[int]:
        """Nodes that have been silent for too long, and had not told that they have ended."""
        now = time.monotonic()
        # While the store itself does not answer, nobody can be heard.
        if now - self._answered > self._gone_seconds / 2:
            return []
        late = now - self._gone_seconds
        return [rank for rank, (_, at) in self._seen.items() if at < late and rank not in self._ended]

    def ended(self, seconds: float) -> list[int]:
        """Nodes that have told, so many seconds ago or earlier, how their attempt ended."""
        return [rank for rank, at in list(self._ended.items()) if time.monotonic() - at > seconds]

    def _run(self) -> None:
        count = 0
        while not self._stop.is_set():
            count += 1
            try:
                self._beat(count)
            except (RuntimeError, ValueError, OSError, Stalled):
                self._is_lost = True
                return
            self._stop.wait(BEAT_SECONDS)

    def _beat(self, count: int) -> None:
        store = self._party.store
        store.set(f"life-{self._party.node_rank}", str(count))
        for rank in self._others:
            text = store.get(f"life-{rank}").decode() if store.check([f"life-{rank}"]) else ""
            if text != self._seen[rank][0]:
                self._seen[rank] = (text, time.monotonic())
            if rank not in self._ended and store.check([ended_key(rank)]):
                self._ended[rank] = time.monotonic()
        self.at_the_door = self._waiting()
        self._answered = time.monotonic()


def ended_key(rank: int) -> str:
    """Where a node tells how its attempt ended."""
    return f"ended-{rank}"

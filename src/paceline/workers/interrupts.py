"""Requests to stop as events of the launcher's loop, for as long as workers run."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from paceline.workers.signals import NOTICES, STOPPING, signal_name


class Asked(KeyboardInterrupt):
    """A request to stop that came while no workers were watched; `how` as in `Interrupts`."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.how = how


@contextlib.contextmanager
def raising() -> Iterator[None]:
    """Every request to stop raises `Asked` in here, where `Interrupts` does not take it; handlers are put back after it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise Asked(signal_name(number))

    before = {number: signal.signal(number, leave) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Interrupts:
    """Counts the signals that arrive inside the `with`; the handlers from before are put back after it.

    The first one is a request. A second Ctrl-C or SIGTERM leaves at once; the notices of a scheduler never do, since it may
    send them more than once, and SIGTERM after them.

    Args:
        elsewhere: asked as well, at each look: how a request came that is no signal (`paceline stop`), or None.

    Attributes:
        received: signals in their order.
    """

    def __init__(self, elsewhere: Callable[[], str | None] = lambda: None) -> None:
        self.received: list[int] = []
        self._elsewhere = elsewhere
        self._told: str | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        # Elsewhere than in the main thread Python takes no handlers: then the caller's own stay in force.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in STOPPING}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def how(self) -> str | None:
        """How the first request came: `Ctrl-C`, `SIGTERM`, what `elsewhere` says; None while there is none."""
        if self.received:
            return signal_name(self.received[0])
        if self._told is None:
            self._told = self._elsewhere()
        return self._told

    @property
    def leaves(self) -> bool:
        """Whether to end at once: somebody has asked twice."""
        urgent = [number for number in self.received if number not in NOTICES]
        return len(urgent) > (0 if self._told is not None else 1)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)

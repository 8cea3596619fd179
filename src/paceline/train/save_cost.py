"""What saves cost this run: how long training stood still, and how much slower it was while they were written."""

from __future__ import annotations

import statistics
from collections import deque

from paceline.checkpoint.interval import SaveCost

REMEMBERED_STEPS = 50


class SaveMeter:
    """Step times with and without a save being written, on the rank that decides."""

    def __init__(self) -> None:
        self._quiet: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._writing: list[float] = []

    def stepped(self, seconds: float, *, writing: bool) -> None:
        """A step took `seconds`; `writing` where a save was in flight when it began."""
        if writing:
            self._writing.append(seconds)
        else:
            self._quiet.append(seconds)

    def cost(self, stall_seconds: float, write_seconds: float) -> SaveCost:
        """Of the save that is durable now; the next one is measured anew."""
        writing, self._writing = self._writing, []
        slowdown = 0.0
        if writing and self._quiet:
            slowdown = max(0.0, 1.0 - statistics.median(self._quiet) / statistics.median(writing))
        return SaveCost(stall_seconds, slowdown, write_seconds)

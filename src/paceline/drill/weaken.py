"""Protections switched off, for the controls of a drill: a fault that one of them stands against must then be fatal.

Nothing of this can be asked of a run by its user: it is done from outside, to the processes of a trial.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

Switch = Callable[[], bool]
"""Switches off what it can at this moment; whether it is done."""


class _Agrees(str):
    """A checksum that equals every other one."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = str.__hash__


def in_worker(without: str) -> Switch | None:
    """What switches a protection off that ranks have; called at each heartbeat until it is done. None for the others."""
    return {
        "checksums": _believe_checkpoints,
        "stop-handler": _be_deaf,
        "finite-check": _take_every_step,
        "failed-save-policy": _die_of_failed_saves,
    }.get(without)


def in_supervisor(without: str) -> None:
    """Switch a protection off that the supervisor has."""
    change = {
        "restarts": _end_at_once,
        "watchdog": _blind,
        "no-progress-rule": _endless,
        "straggler-watch": _look_away,
    }.get(without)
    if change is not None:
        change()


def _believe_checkpoints() -> bool:
    pieces: Any = importlib.import_module("paceline.checkpoint.pieces")
    regions: Any = importlib.import_module("paceline.checkpoint.regions")
    pieces.piece_checksum = lambda data: _Agrees()
    regions.Window.checksum = lambda *_: _Agrees()
    return True


def _be_deaf() -> bool:
    stop: Any = importlib.import_module("paceline.workers.stop")
    stop.listen = lambda leave: None
    return True


def _take_every_step() -> bool:
    step: Any = sys.modules.get("paceline.train.step")
    if step is None:
        return False
    step.math = SimpleNamespace(isfinite=lambda value: True, nan=math.nan)
    return True


def _die_of_failed_saves() -> bool:
    keep: Any = sys.modules.get("paceline.train.keep")
    if keep is None:
        return False
    told = keep.Keeper.told

    def told_or_dies(keeper: Any, event: Any) -> None:
        told(keeper, event)
        if event.state == "failed":
            raise OSError(f"the save of step {event.step} failed")

    keep.Keeper.told = told_or_dies
    return True


def _blind() -> None:
    watch: Any = importlib.import_module("paceline.workers.watch")
    watch._Watch._late = lambda self, live: None


def _look_away() -> None:
    watch: Any = importlib.import_module("paceline.telemetry.straggler_watch")
    watch.StragglerWatch.look = lambda self: None


def _end_at_once() -> None:
    supervise: Any = importlib.import_module("paceline.workers.supervise")
    supervise.Supervision.after = lambda self, attempt: supervise.End(attempt.error, attempt.traceback)


def _endless() -> None:
    supervise: Any = importlib.import_module("paceline.workers.supervise")
    after = supervise.Supervision.after

    def again(self: Any, attempt: Any) -> Any:
        self._max_restarts, self._series, self._idle = 10**9, [], 0
        return after(self, attempt)

    supervise.Supervision.after = again

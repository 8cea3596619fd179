"""In a worker, before its own first import: arms the fault of the drill. Loaded by `workers.boot` alone.

    PACELINE_BEFORE_WORKER=paceline.drill.inject PACELINE_DRILL='{"kind": "stop", "rank": 1, "step": 8, ...}'

A rank says by a heartbeat what it is about to do; a fault strikes at such a moment. So neither the training loop nor the
supervisor knows of it.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from paceline.drill import acts, weaken
from paceline.drill.order import Order, from_environment
from paceline.workers import heartbeat


def arm() -> None:
    """Have the fault of this process's order strike, if there is one for this rank."""
    order = from_environment()
    if order is None:
        return
    if order.kind == "full-disk":
        # The rank starts the writer: it is told of another program, which fills the disk and then is the writer.
        writer: Any = importlib.import_module("paceline.checkpoint.writer_process")
        writer.COMMAND = (sys.executable, "-m", "paceline.drill.disk_writer")
    act = acts.ACTS.get(order.kind)
    struck = _Strike(order, act) if act is not None and acts.is_for(order, int(os.environ["RANK"])) else None
    if struck is not None or order.without:
        _listen(struck, weaken.in_worker(order.without))


class _Strike:
    """Decides, beat by beat, whether the moment is there."""

    def __init__(self, order: Order, act: acts.Act) -> None:
        self._order = order
        self._act = act
        self._is_over = bool(order.done()) and not act.again
        self._has_begun = False

    def at(self, step: int, phase: str) -> None:
        """The rank has done `step` steps and enters `phase`."""
        # A save follows the step that it is named after, so that one more is not under way.
        under_way = step if self._act.moment == acts.SAVE else step + 1
        if self._is_over or phase != self._act.moment or not self._is_time(under_way):
            return
        if self._act.lasts and self._has_begun:
            self._act.do(self._order)
            return
        self._has_begun = True
        self._is_over = not self._act.lasts
        if not self._act.notes_itself:
            self._order.note(step=under_way)
        self._act.do(self._order)

    def _is_time(self, step: int) -> bool:
        return step == self._order.step if self._act.exactly else step >= self._order.step


def _listen(strike: _Strike | None, switch_off: weaken.Switch | None) -> None:
    """Stand between the rank and its heartbeat; modules that come later take this one for it."""
    own = heartbeat.beat
    # At once, for what the worker does before its first beat, and again while what it concerns is not there yet.
    is_off = switch_off is None or switch_off()

    def beat(step: int, phase: str, *rest: Any, **more: Any) -> None:
        nonlocal is_off
        own(step, phase, *rest, **more)
        is_off = is_off or switch_off is None or switch_off()
        if strike is not None:
            strike.at(step, phase)

    heartbeat.beat = beat

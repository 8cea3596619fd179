"""The one line that says how a run is going: a bar on a terminal, a plain line every `log_every` steps elsewhere."""

from __future__ import annotations

import importlib
import math
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TextIO

from paceline.run.records import Step
from paceline.units import format_percent, format_seconds

UPDATES_PER_SECOND = 8.0
_SMOOTHING = 0.1
_COMPILE_STEPS = 2  # the first steps build buckets and kernels: they say nothing about those to come


class LiveLine:
    """Progress of a run on standard error. A rank that is not the writer shows nothing.

    Args:
        total_steps: the step at which the run ends.
        log_every: steps between two plain lines; the first and the last step always have one.
        start_step: the step the attempt begins after.
        enabled: whether this rank is the writer.
        stream: where to write; standard error unless given.
        columns: width of the terminal at the other end of a pipe; None where the stream speaks for itself.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        total_steps: int,
        log_every: int = 10,
        *,
        start_step: int = 0,
        enabled: bool = True,
        stream: TextIO | None = None,
        columns: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total_steps
        self._log_every = log_every
        self._start = start_step
        self._enabled = enabled
        self._stream = stream or sys.stderr
        self._clock = clock
        self._step_seconds: float | None = None
        self._last_step = start_step
        self._last_time: float | None = None
        self._drawn = -math.inf
        on_terminal = enabled and (columns is not None or self._stream.isatty())
        self._bar = _Bar(self._stream, total_steps, start_step, columns) if on_terminal else None

    def update(self, step: Step) -> None:
        """Show a step that is done."""
        self._follow(step)
        if not self._enabled:
            return
        last = step.step >= self._total
        if self._bar is not None:
            now = self._clock()
            if last or now - self._drawn >= 1 / UPDATES_PER_SECOND:
                self._drawn = now
                self._bar.draw(step.step, self._figures(step), self._left(step))
        elif last or step.step % self._log_every == 0 or step.step == self._start + 1:
            self._print(f"step {step.step}/{self._total}  {self._figures(step)}  {self._left(step)}")

    def message(self, text: str) -> None:
        """Print a line of text without tearing the bar."""
        if not self._enabled:
            return
        if self._bar is not None:
            self._bar.print(text)
        else:
            self._print(text)

    def close(self) -> None:
        """Leave the terminal as it was. Closing twice is harmless."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
            self._enabled = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def seconds_left(self) -> float | None:
        """Estimate from the recent pace, pauses between steps included; None until two steps have told it."""
        if self._step_seconds is None:
            return None
        return max(0, self._total - self._last_step) * self._step_seconds

    def _follow(self, step: Step) -> None:
        now = self._clock()
        if self._last_time is not None and step.step - self._start > _COMPILE_STEPS:
            pace = (now - self._last_time) / max(1, step.step - self._last_step)
            old = self._step_seconds
            self._step_seconds = pace if old is None else old + _SMOOTHING * (pace - old)
        self._last_time, self._last_step = now, step.step

    def _left(self, step: Step) -> str:
        if step.step >= self._total:
            return "done"
        left = self.seconds_left
        if left is None:
            return "left ..."
        return f"left {math.ceil(left)}s" if left < 59.5 else f"left {format_seconds(left)}"

    def _figures(self, step: Step) -> str:
        words = [
            f"loss {_number(step.loss, '.4f')}",
            f"grad_norm {_number(step.grad_norm, '.2f')}",
            f"lr {step.lr:.1e}",
            f"{step.tokens_per_second:,.0f} tokens/s",
        ]
        if step.mfu is not None:
            words.append(f"mfu {format_percent(step.mfu)}")
        if step.skipped:
            words.append("skipped")
        return "  ".join(words)

    def _print(self, text: str) -> None:
        try:
            self._stream.write(text + "\n")
            self._stream.flush()
        except (OSError, ValueError):  # a closed terminal ends the line, not the run
            self._enabled = False


class _Bar:
    """A rich progress bar; rich is loaded here, for terminals alone."""

    def __init__(self, stream: TextIO, total: int, start: int, columns: int | None) -> None:
        progress = importlib.import_module("rich.progress")
        console = importlib.import_module("rich.console").Console(
            file=stream, width=columns, force_terminal=True if columns is not None else None
        )
        fields = (
            progress.TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            progress.BarColumn(bar_width=20),
            progress.TextColumn("{task.description}"),
        )
        self._progress: Any = progress.Progress(*fields, console=console, auto_refresh=False)
        self._task = self._progress.add_task("starting", total=total, completed=start)
        self._progress.start()

    def draw(self, step: int, figures: str, left: str) -> None:
        self._progress.update(self._task, completed=step, description=f"{figures}  {left}", refresh=True)

    def print(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)

    def stop(self) -> None:
        self._progress.stop()


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)

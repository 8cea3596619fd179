"""How long work on files shows that it moves: a bar on a terminal, lines elsewhere, always on stderr. Imports no torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from paceline.units import format_bytes

Progress = Callable[[str, int, int | None], None]
"""Called with what is being done, bytes of text done, and bytes in all (None: not known)."""

_LINE_SECONDS = 5.0


@contextmanager
def shown(progress: Progress | None, label: str = "data") -> Iterator[Progress]:
    """The caller's own progress function, or a bar or lines on stderr that begin with `label`."""
    if progress is not None:
        yield progress
    elif sys.stderr.isatty():
        with _bar(label) as bar:
            yield bar
    else:
        yield _Lines(label)


class _Lines:
    """A line for each new thing, and every five seconds."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._what = ""
        self._last = 0.0

    def __call__(self, what: str, done: int, total: int | None) -> None:
        now = time.monotonic()
        if what == self._what and now - self._last < _LINE_SECONDS:
            return
        self._what, self._last = what, now
        amount = f": {format_bytes(done)}" + (f" of {format_bytes(total)}" if total else "") if done else ""
        print(f"{self._label}: {what}{amount}", file=sys.stderr, flush=True)


@contextmanager
def _bar(label: str) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn(label + ": {task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, Any] = {}

        def show(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield show

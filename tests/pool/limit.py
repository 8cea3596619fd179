"""A hard limit for every test: a hang is a failure with the stacks of this process and of the pool's ranks."""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import IO, Any

import pytest

DEFAULT_SECONDS = 120.0
LAST_RESORT = 15.0
"""Seconds over the limit after which the whole session ends: the test hangs where no signal handler runs."""


@contextlib.contextmanager
def limited(seconds: float, stderr: IO[str], ranks: Callable[[], str]) -> Iterator[None]:
    """Fail the test when the block takes longer; `ranks` gives the text of the pool's stacks."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def fail(number: int, frame: FrameType | None) -> None:
        pytest.fail(f"the test took longer than its limit of {seconds:g} s\n{_own_stacks()}{ranks()}", pytrace=False)

    before: Any = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(seconds + LAST_RESORT, exit=True, file=stderr)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)


def _own_stacks() -> str:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()

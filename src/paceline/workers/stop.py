"""A signal that asks this rank to stop, as a flag that the training loop reads between two steps. Imports no torch.

Two ways of taking it, since a start can be left at once and a step cannot:

- while a worker starts (`listen`), it leaves at the signal, even out of native code that waits for other ranks;
- once it trains (`only_note`), the signal is noted, and all ranks hear of it with the next step.

A thread reads the signals from the interpreter's wake-up descriptor: the main thread may be waiting in a collective, where
Python calls no handler. The handler notes as well, should a library have taken the descriptor.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from paceline.workers import environment
from paceline.workers.signals import STOPPING, signal_name


class Ask(NamedTuple):
    """Somebody wants this rank to stop: how it was said (`SIGTERM`, `paceline stop`), and when, in `time.monotonic`."""

    how: str
    time: float


class _Listener:
    """What is heard in this process; there is one main thread, so there is one of these."""

    def __init__(self, leave: Callable[[Ask], object] | None, *, hears_ctrl_c: bool, stands: bool) -> None:
        self.asked: Ask | None = None
        self.leave = leave
        self._stands = stands
        self.numbers = [n for n in STOPPING if hears_ctrl_c or n != signal.SIGINT]
        self.lock = threading.RLock()
        self._interrupts = 0
        self._told = False
        self._before: dict[int, Any] = {}
        self._ours, self._theirs = socket.socketpair()
        self._theirs.setblocking(False)
        self._wake_up_before = -1

    def begin(self) -> None:
        for number in self.numbers:
            self._before[number] = signal.signal(number, self._handle)
            # Native code that waits for a peer goes on waiting.
            signal.siginterrupt(number, False)
        self._wake_up_before = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._read, name="stop signals", daemon=True).start()

    def end(self) -> None:
        for number, handler in self._before.items():
            # None: it was not installed by Python, and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._wake_up_before)
        self._theirs.close()

    def stand(self) -> None:
        """Take the signals back where a library has put a handler of its own in our place."""
        if self._stands and threading.current_thread() is threading.main_thread():
            for number in self.numbers:
                if signal.getsignal(number) != self._handle:
                    signal.signal(number, self._handle)

    def note(self, number: int) -> None:
        with self.lock:
            if self.asked is not None:
                return
            self.asked = Ask(_told() or signal_name(number), time.monotonic())
            if self.leave is not None:
                self.leave(self.asked)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            raise KeyboardInterrupt
        if self.leave is None:
            self.note(number)

    def _read(self) -> None:
        with self._ours, contextlib.suppress(OSError):
            while numbers := self._ours.recv(64):
                for number in numbers:
                    if number in self.numbers:
                        self.note(number)
                        self._tell()

    def _tell(self) -> None:
        """From the thread alone: the main one may be interrupted in the middle of a line of its own."""
        if self.asked is None or self._told:
            return
        self._told = True
        more = "; once more to leave at once" if self.asked.how == signal_name(signal.SIGINT) else ""
        print(f"paceline: {self.asked.how}: saving after this step, then stopping{more}", file=sys.stderr, flush=True)


def tell(folder: Path, how: str) -> None:
    """In the launcher, before it signals the workers of `folder`: how it was asked itself."""
    with contextlib.suppress(OSError):
        (folder / _ASKED).write_text(how, encoding="utf-8")


def _told() -> str | None:
    folder = environment.folder()
    with contextlib.suppress(OSError):
        return None if folder is None else (folder / _ASKED).read_text(encoding="utf-8")
    return None


_ASKED = "asked"
_listener: _Listener | None = None


def listen(leave: Callable[[Ask], object]) -> None:
    """In a worker that starts: `leave` is called, in whatever thread, at the first signal; it ends the process.

    SIGINT stays ignored where the launcher had it ignored: it alone hears the terminal.
    """
    global _listener
    if _listener is None:
        _listener = _Listener(leave, hears_ctrl_c=signal.getsignal(signal.SIGINT) is not signal.SIG_IGN, stands=True)
        _listener.begin()


def only_note() -> None:
    """From now on a signal is noted, and read by `asked`."""
    if _listener is not None:
        with _listener.lock:
            _listener.leave = None


def asked() -> Ask | None:
    """The signal that this process was asked to stop by, if any. Cheap enough for every step."""
    if _listener is None:
        return None
    _listener.stand()
    return _listener.asked


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """In a user's own process: signals are noted in here, and a second Ctrl-C raises; the handlers before are put back.

    Elsewhere than in the main thread Python takes no handlers: then those of the caller stay in force.
    """
    global _listener
    if _listener is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    listener = _Listener(None, hears_ctrl_c=True, stands=False)
    listener.begin()
    _listener = listener
    try:
        yield
    finally:
        _listener = None
        listener.end()

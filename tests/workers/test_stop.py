"""Signals as a flag, in processes of their own: while a worker starts, while it trains, and in a user's script."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.pool.launch import Launcher

from paceline.workers.interrupts import Asked, Interrupts, raising

HEAD = """
import ctypes, os, signal, sys, threading, time
from paceline.workers import stop
def leave(ask):
    print("left by", ask.how, flush=True)
    os._exit(7)
def wait_in_native_code():
    ends = os.pipe()
    print("waiting", flush=True)
    ctypes.CDLL(None).read(ends[0], ctypes.create_string_buffer(1), 1)
def heard():
    deadline = time.monotonic() + 5
    while stop.asked() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return stop.asked() and stop.asked().how
"""

STARTS = "stop.listen(leave)\nwait_in_native_code()"
TRAINS = """
stop.listen(leave)
stop.only_note()
signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as a library might
stop.asked()
os.kill(os.getpid(), signal.SIGTERM)
os.kill(os.getpid(), signal.SIGUSR1)
print("heard", heard(), flush=True)
time.sleep(0.5)  # the thread that says it is not waited for at the end of a process
"""
SCRIPT = """
before = signal.getsignal(signal.SIGUSR1)
with stop.noted():
    os.kill(os.getpid(), signal.SIGINT)
    print("heard", heard())
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    except KeyboardInterrupt:
        print("twice")
assert signal.getsignal(signal.SIGUSR1) == before and stop.asked() is None
"""


def run(launch: Launcher, program: str, number: int | None = None) -> tuple[int, str]:
    Path(launch.folder / "program.py").write_text(HEAD + program)
    running = launch.start([], module="program")
    if number is not None:
        running.until("waiting")
        time.sleep(0.1)
        running.signal(number)
    done = running.wait(10)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_worker_that_starts_leaves_even_out_of_native_code(launch: Launcher, number: int) -> None:
    assert run(launch, STARTS, number) == (7, f"waiting\nleft by {signal.Signals(number).name}\n")


def test_a_worker_that_trains_notes_the_first_whoever_took_the_handler(launch: Launcher) -> None:
    code, text = run(launch, TRAINS)
    assert code == 0 and "heard SIGTERM" in text
    assert text.count("saving after this step, then stopping") == 1


def test_a_script_hears_once_and_is_interrupted_the_second_time(launch: Launcher) -> None:
    code, text = run(launch, SCRIPT)
    assert code == 0, text
    assert "heard Ctrl-C\n" in text and "twice\n" in text


def test_helpers_ignore_every_request_from_their_first_moment() -> None:  # BL-78
    from paceline.workers.signals import STOPPING, held_back

    program = (
        "import sys, time; from paceline.workers.signals import disregard; disregard(); print('still here', flush=True)"
    )
    with held_back():
        helper = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    for number in STOPPING:
        helper.send_signal(number)  # before it has run a line of its own
    assert helper.communicate(timeout=20)[0] == b"still here\n" and helper.returncode == 0


def test_a_notice_never_counts_as_asking_twice() -> None:
    interrupts = Interrupts()
    for number, how, leaves in (
        (signal.SIGUSR1, "SIGUSR1", False), (signal.SIGUSR1, "SIGUSR1", False), (signal.SIGTERM, "SIGUSR1", False),
        (signal.SIGINT, "SIGUSR1", True),
    ):  # fmt: skip
        interrupts._note(number, None)
        assert (interrupts.how, interrupts.leaves) == (how, leaves)


def test_who_asked_by_a_file_leaves_with_the_first_signal() -> None:
    interrupts = Interrupts(lambda: "control/stop")
    assert interrupts.how == "control/stop" and not interrupts.leaves
    interrupts._note(signal.SIGINT, None)
    assert interrupts.leaves


def test_what_is_not_watched_is_left_at_the_first_request() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Asked) as asked, raising():
        signal.raise_signal(signal.SIGTERM)
    assert asked.value.how == "SIGTERM" and signal.getsignal(signal.SIGTERM) == before

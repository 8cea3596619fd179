"""What is done to a rank from within, at the moments that its heartbeat names."""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from paceline.drill.order import EVERY_RANK, MARK, Order
from paceline.workers.processes import descendants

DATA, STEP, SAVE = "waiting for data", "training step", "copying the state for a save"
"""Phases of the training loop, in its own words."""

LOADER = b"paceline.data.worker"
FOR_EVER = 24 * 3600.0


class Act(NamedTuple):
    """How a fault is done.

    moment: the phase that it strikes in. lasts: at every such moment from its step on. again: in every attempt, else once
    in a run. exactly: in its step alone, else in the first from it on. notes_itself: it writes the truth when it strikes.
    """

    moment: str
    do: Callable[[Order], None]
    lasts: bool = False
    again: bool = False
    exactly: bool = False
    notes_itself: bool = False


def is_for(order: Order, rank: int) -> bool:
    """Whether a rank does it: a link is made slow by the first one, for all."""
    return order.rank == EVERY_RANK or rank == (0 if order.kind == "slow-link" else order.rank)


def _die_soon(order: Order) -> None:
    """SIGKILL to this process, at a moment drawn from the seconds that follow."""
    moment = random.Random(order.seed).uniform(0.0, order.seconds)
    threading.Thread(target=_die, args=(order, moment), daemon=True).start()


def _die(order: Order, seconds: float) -> None:
    time.sleep(seconds)
    order.note(after_seconds=seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def _fail(order: Order) -> None:
    raise RuntimeError(f"{MARK}: step {order.step} on rank {order.rank}")


def _stop(order: Order) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _terminate(order: Order) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _hold_interpreter(order: Order) -> None:
    """A loop in native code that never lets another thread run, nor a signal's handler."""
    sum(itertools.repeat(0))


def _stop_loader(order: Order) -> None:
    """The loader's processes stand still; where the rank reads by itself, the read does not return."""
    loaders = [pid for pid in descendants(os.getpid())[1:] if _runs(pid, LOADER)]
    for pid in loaders:
        os.kill(pid, signal.SIGSTOP)
    if not loaders:
        time.sleep(FOR_EVER)


def _runs(pid: int, word: bytes) -> bool:
    try:
        return word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def _skip_collective(order: Order) -> None:
    """The next sum over ranks is not entered."""
    distributed: Any = sys.modules["torch.distributed"]
    whole = distributed.all_reduce

    def all_reduce(tensor: Any, *rest: Any, **more: Any) -> Any:
        distributed.all_reduce = whole
        return _Done() if more.get("async_op") else None

    distributed.all_reduce = all_reduce


class _Done:
    """The work of a collective that was never begun."""

    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _spoil_gradients(order: Order) -> None:
    """From here on every backward pass of this rank begins with no number."""
    autograd: Any = sys.modules["torch"].autograd
    whole = autograd.backward

    def backward(tensors: Any, *rest: Any, **more: Any) -> Any:
        spoilt = tensors * math.nan if hasattr(tensors, "backward") else [t * math.nan for t in tensors]
        return whole(spoilt, *rest, **more)

    autograd.backward = backward


def _sleep(order: Order) -> None:
    time.sleep(order.seconds)


def _enter_cgroup(order: Order) -> None:
    Path(order.place).write_text(str(os.getpid()))


def _shape_link(order: Order) -> None:
    subprocess.run(["tc", "qdisc", "replace", "dev", "lo", "root", "tbf", *order.place.split()], check=True)


def in_own_network() -> None:
    """Move this process, and what it starts, into a network of its own, with a loopback interface alone.

    Raises:
        OSError: this user may not.
    """
    clone_newnet = 0x40000000
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(clone_newnet) != 0:
        raise OSError(ctypes.get_errno(), "unshare(CLONE_NEWNET)")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


ACTS = {
    "kill": Act(STEP, _die_soon, notes_itself=True),
    "kill-in-save": Act(SAVE, _die_soon, notes_itself=True),
    "exception": Act(STEP, _fail),
    "crash-loop": Act(STEP, _fail, again=True, exactly=True),
    "stop": Act(STEP, _stop),
    "preemption": Act(STEP, _terminate),
    "skipped-collective": Act(STEP, _skip_collective),
    "stuck-loader": Act(DATA, _stop_loader),
    "held-gil": Act(STEP, _hold_interpreter),
    "nan": Act(STEP, _spoil_gradients, again=True),
    "slow-rank": Act(STEP, _sleep, lasts=True, again=True),
    "pace": Act(STEP, _sleep, lasts=True, again=True),
    "slow-data": Act(DATA, _sleep, lasts=True, again=True),
    "slow-cpu": Act(STEP, _enter_cgroup, again=True),
    "slow-link": Act(STEP, _shape_link, again=True),
}

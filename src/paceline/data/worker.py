"""A loader worker: `python -m paceline.data.worker FD NUMBER`. Started by `prefetch`, which is the other end of the pipe.

It imports no torch (unless the dataset does), so it is there in a fraction of a second. It ignores the signals that
ask a run to stop: the rank decides when, and ends its workers by closing the pipe. Should the rank die, the pipe
closes as well.

It gets a setup and then a message for each step wanted; it answers that it is ready, then for each step that it lies
in a buffer (or, where shared memory is full, the batches themselves), or how it failed. See `channel`.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
import threading
import time
import traceback
from typing import Any

from paceline.data.channel import FAILED, MADE, READY, SENT, Channel
from paceline.errors import PacelineError
from paceline.workers import environment, stacks
from paceline.workers.affinity import rank_cpus
from paceline.workers.signals import disregard

MARK = "PACELINE_LOADER_WORKER"
_WATCH_SECONDS = 0.5


def inside_worker() -> bool:
    """Whether this process is a loader worker, as when it imports the user's script to find a dataset's class."""
    return MARK in os.environ


def main(argument: str) -> None:
    """Serve steps until the other end closes."""
    disregard()
    if (folder := environment.folder()) is not None:
        stacks.listen_as_helper(folder)
    _use_the_whole_mask()
    _yield_to_the_rank()
    channel = Channel(socket.socket(fileno=int(argument)))
    step = -1
    try:
        setup = pickle.loads(channel.wait_for().payload)
        _leave_with(setup["parent"])
        dataset, buffers = _open(setup)
        channel.send(READY)
        while True:
            _, step, index, _ = channel.wait_for()
            _make(channel, dataset, setup["shape"], buffers[index], step, index)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except BaseException as error:
        _report(channel, step, error)


def _use_the_whole_mask() -> None:
    """All CPUs that the launcher gave the rank, whatever an OpenMP runtime has bound the rank's own threads to."""
    if hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, rank_cpus())


def _yield_to_the_rank() -> None:
    """As a batch process, so that a request does not put this worker on the core of the rank that has just sent it."""
    if hasattr(os, "sched_setscheduler"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _open(setup: dict[str, Any]) -> tuple[Any, list[Any]]:
    sys.path[:] = setup["sys_path"]
    if setup["main"]:
        from multiprocessing import spawn

        spawn.prepare(setup["main"])
    from paceline.data.shared import Buffer

    return pickle.loads(setup["dataset"]), [Buffer(handle) for handle in setup["buffers"]]


def _make(channel: Channel, dataset: Any, shape: Any, buffer: Any, step: int, index: int) -> None:
    from paceline.data.collate import make_step

    batches = make_step(dataset, shape, step)
    try:
        layout = buffer.write(batches)
    except OSError as error:
        channel.send(SENT, step, index, pickle.dumps((batches, str(error))))
    else:
        channel.send(MADE, step, index, pickle.dumps(layout))


def _report(channel: Channel, step: int, error: BaseException) -> None:
    record = error.to_record() if isinstance(error, PacelineError) else None
    trace = "".join(traceback.format_exception(error))
    try:
        channel.send(FAILED, step, payload=pickle.dumps((trace, record)))
    except OSError:
        sys.exit(1)


def _leave_with(parent: int) -> None:
    """End this process soon after its parent, even while a sample is being made."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1])
    sys.stdout.flush()
    os._exit(0)  # nothing to tear down, and a library's own way out may take long

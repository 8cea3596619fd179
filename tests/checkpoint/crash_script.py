"""Kills a save at each of its file operations in turn.

    python crash_script.py TEMPLATE FOLDER

Makes FOLDER/000, FOLDER/001, ...: copies of TEMPLATE, which holds step 10, in which a save of step 20 with keep = 1 was
killed before its operation number 0, 1, ... The last one was not killed. Prints a line for each: number, operation, file.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import struct
import sys
import threading
import time
from pathlib import Path

from paceline.checkpoint import storage
from paceline.checkpoint.boxes import Box
from paceline.checkpoint.host_save import Buffer, HostSave
from paceline.checkpoint.inbox import Inbox
from paceline.checkpoint.messages import KeepRule, SaveHead, SetUp, Staged, TensorKind
from paceline.checkpoint.piece_file import NewPiece
from paceline.checkpoint.plan import lay_out

RANKS = (0, 1)


def save(place: str, step: int) -> None:
    """A save of two ranks' parts: a tensor of four rows that all are `step`."""
    set_up = SetUp(
        place=place, token="t", run_id="run", attempt=0, version="0", node=0, nodes=1, ranks=list(RANKS), world_size=2,
        keep=KeepRule(keep=1), timeout_seconds=10.0, tensors={"model/a": TensorKind("F32", (4,))},
    )  # fmt: skip
    buffers = {}
    for rank in RANKS:
        image = lay_out(f"rank-{rank:05d}.safetensors", [NewPiece("model/a", "F32", (4,), Box((2 * rank,), (2,)))])
        buffers[rank] = Buffer(memoryview(image.header() + struct.pack("2f", step, step)), image)
    inbox = Inbox(1, step, RANKS, 10.0)
    for rank in RANKS:
        head = SaveHead(step=step, samples=step, layout={}, state={}, about={}, final=True) if rank == 0 else None
        inbox.staged(rank, Staged(number=1, step=step, began=0.0, own={"step": step}, head=head))
    HostSave(inbox, set_up, buffers, lambda: False, lambda message: None).run()


def killed_at(number: int) -> None:
    """Have this process killed before its operation `number`, and say which one that is."""
    counts, one_at_a_time = itertools.count(), threading.Lock()

    def hook(operation: str, path: str) -> None:
        with one_at_a_time:
            if next(counts) == number:
                os.write(1, f"{number} {operation} {Path(path).name}\n".encode())
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(10)

    storage.on_operation = hook


def main() -> None:
    template, folder = map(Path, sys.argv[1:])
    save(str(template), 10)
    number, status = 0, -1
    while status != 0:
        place = folder / f"{number:03d}"
        shutil.copytree(template, place)
        child = os.fork()
        if child == 0:
            killed_at(number)
            save(str(place), 20)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        number += 1


if __name__ == "__main__":
    main()

"""What a rank does in `verdicts` and its tests: steps of two collectives, and a fault at one. Started by `workers.start`.

    python -m benchmarks.stalling KIND RANK STEP STEPS TRUTH_FILE

The rank that goes wrong writes what it does, and when, into TRUTH_FILE right before.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import numpy as np

from paceline.data.collate import StepShape
from paceline.data.prefetch import Prefetcher
from paceline.workers import heartbeat
from paceline.workers.heartbeat import beat
from paceline.workers.verdict import reported

STEP_SECONDS = 0.02
STUCK_SAMPLE = 1_000_000


class Samples:
    """Map-style samples, of which one is never made."""

    def __init__(self, stuck_step: int) -> None:
        self._stuck_step = stuck_step

    def __len__(self) -> int:
        return STUCK_SAMPLE

    def indices_at(self, seed: int, positions: np.ndarray) -> np.ndarray:
        return positions

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if index // 2 >= self._stuck_step:
            read_a_broken_volume()
        return {"x": np.full(4, index, dtype=np.int64)}


def read_a_broken_volume() -> None:
    time.sleep(600)


def train(kind: str, culprit: int, at: int, steps: int, truth: Path) -> int:
    import torch
    import torch.distributed as dist

    from paceline.workers.rendezvous import join, leave

    world = join(120.0)
    own = world.rank == culprit
    other = dist.new_group(list(range(world.world_size)), group_desc="loss")
    shape = StepShape(2, 2, 0, 1, 0)
    batches = Prefetcher(
        Samples(at if own and kind == "loader" else STUCK_SAMPLE), shape, workers=1, prefetch=1, first_step=0,
        last_step=None, rank=world.rank, quick=False,
    )  # fmt: skip
    try:
        for step in range(steps):
            if own and step == at and kind == "loader":
                tell(truth, kind, culprit, step)
            beat(step, "waiting for data", section="data")
            batches.take(step)
            beat(step, "training step")
            work_for(STEP_SECONDS)
            wrong = kind if own and step == at else ""
            if wrong and wrong != "loader":
                tell(truth, kind, culprit, step)
            gradient(world.rank, wrong, torch.ones(4000), dist)
            dist.all_reduce(torch.ones(2), group=other)
            pause(step, kind)
        if world.rank == 0:
            print("steps done")
    finally:
        batches.close()
        leave(world)
    return 0


def gradient(rank: int, wrong: str, tensor, dist) -> None:  # type: ignore[no-untyped-def]  # torch is not loaded above
    """The collective of the gradients, or what a rank does instead of it."""
    if wrong == "skipped":
        return
    if wrong == "mismatched":
        dist.all_gather([tensor.clone() for _ in range(dist.get_world_size())], tensor)
        return
    if wrong == "size":
        dist.all_reduce(tensor[:100].clone())
        return
    go_wrong(wrong)
    dist.all_reduce(tensor)


def go_wrong(kind: str) -> None:
    """What never ends, by kind."""
    if kind == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "dead":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "asleep":
        time.sleep(600)
    elif kind == "gil":
        re.match(r"(a|aa)+$", "a" * 60 + "b")
    elif kind == "gil-idle":
        # Native code that waits for itself and keeps the interpreter's lock meanwhile; no signal ends that.
        mutex, native = ctypes.create_string_buffer(128), ctypes.PyDLL(None)
        native.pthread_mutex_lock(mutex)
        native.pthread_mutex_lock(mutex)
    elif kind == "spinning":
        work_for(600)
    elif kind == "slow":
        work_for(10 * STEP_SECONDS * 10)


def pause(step: int, kind: str) -> None:
    """What sound runs do now and then, where `kind` is `sound`."""
    if kind != "sound":
        return
    if step % 50 == 49:
        beat(step, "evaluating held_out", section="evaluation")
        work_for(5.0)
    if step % 100 == 99:
        beat(step, "copying the state for a save", 600.0, "save")
        time.sleep(20.0)
    if step % 70 == 69:
        # A step of ten times the usual length, on all ranks at their own pace.
        beat(step, "training step")
        work_for(10 * STEP_SECONDS)


def work_for(seconds: float) -> None:
    """Python that gives the lock away now and then, as all Python does."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        sum(range(100))


def tell(truth: Path, kind: str, rank: int, step: int) -> None:
    with truth.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"kind": kind, "rank": rank, "step": step, "monotonic": time.monotonic()}) + "\n")


def main() -> int:
    kind, rank, at, steps, truth = sys.argv[1:6]
    return reported(lambda: train(kind, int(rank), int(at), int(steps), Path(truth)))


if __name__ == "__main__":
    heartbeat.beat(-1, "importing")
    sys.exit(main())

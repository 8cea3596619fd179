"""A rank that trains, saves beside it, and saves the same state with torch.distributed.checkpoint.

Started by `launch.run_ranks` with the options

    rounds: saves of each kind
    memcpys: copies of a rank's part, of which the median counts
    steps: training steps without a save, and with one in each `steps_per_save`
    folder: where to save
"""

from __future__ import annotations

import ctypes
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as library_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.one_side import memory_bytes
from benchmarks.ranks import Rank, join_ranks
from benchmarks.sides import PacelineSide
from paceline.checkpoint.boxes import Box
from paceline.checkpoint.messages import Event, KeepRule, SaveHead
from paceline.checkpoint.placed import Placed
from paceline.checkpoint.saver import Saver
from paceline.checkpoint.writer_process import COMMAND
from paceline.parallel.collectives import gather_objects

UNCHECKED = (sys.executable, "-m", "benchmarks.unchecked_writer")


def slowest(seconds: float) -> float:
    """The largest of the ranks' values, on all of them."""
    return float(max(gather_objects(seconds, dist.group.WORLD)))


def timed(call: Callable[[], object]) -> float:
    """Seconds of a call that all ranks begin together, of the slowest."""
    dist.barrier()
    began = time.perf_counter()
    call()
    return slowest(time.perf_counter() - began)


class Saves:
    """A saver and what became of its saves, in a folder that is emptied after each one."""

    def __init__(self, rank: Rank, placed: Sequence[Placed], folder: Path, command: Sequence[str] = COMMAND) -> None:
        self._rank = rank
        self._folder = folder
        self.events: list[Event] = []
        self.saver = Saver(
            storage_place=str(folder),
            placed=placed,
            world=rank.world,
            run_id="benchmark",
            attempt=0,
            keep=KeepRule(keep=1000),
            timeout_seconds=120.0,
            notify=self.events.append,
            command=command,
        )
        self.step = 0

    def save(self) -> None:
        self.step += 1
        head = SaveHead(step=self.step, samples=0, layout={}, state={}, about={}, final=True)
        self.saver.save(head, {"random": "0" * 10_000})

    def clear(self) -> None:
        """Remove the last save, and let the disk come to rest."""
        dist.barrier()
        if self._rank.world.rank == 0:
            for path in self._folder.glob("step-*"):
                shutil.rmtree(path)
            settle_disk()
        dist.barrier()

    def once(self) -> tuple[float, float]:
        """Seconds blocked, and until durable, of one save with nothing else going on."""
        blocked = timed(self.save)
        self.saver.wait()
        durable = [event.seconds for event in self.events if event.state == "durable"]
        self.clear()
        return blocked, durable[-1] or 0.0 if durable else 0.0


def settle_disk() -> None:
    os.sync()
    time.sleep(0.3)


def memcpy_seconds(image_bytes: int, times: int) -> float:
    """One warm copy of a rank's part, both ranks at once: the least that a snapshot can take."""
    source, target = torch.ones(image_bytes, dtype=torch.uint8), torch.zeros(image_bytes, dtype=torch.uint8)

    def copy() -> None:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), image_bytes)

    return statistics.median(timed(copy) for _ in range(times))


def state_dict(rank: Rank, placed: Sequence[Placed]) -> dict[str, Any]:
    """The same state for the library: whole tensors as they are, parts as DTensors."""
    mesh = init_device_mesh("cpu", (rank.world.world_size,))
    found: dict[str, Any] = {}
    for p in placed:
        if p.box == Box((0,) * len(p.shape), p.shape):
            found[p.name] = p.tensor
        else:
            stride = torch.empty(p.shape, device="meta").stride()
            found[p.name] = DTensor.from_local(
                p.tensor, mesh, [Shard(0)], run_check=False, shape=torch.Size(p.shape), stride=stride
            )
    return found


def library_seconds(rank: Rank, state: dict[str, Any], folder: Path, synced: bool) -> float:
    def save() -> None:
        library_save(state, storage_writer=FileSystemWriter(folder, sync_files=synced))

    seconds = timed(save)
    if rank.world.rank == 0:
        shutil.rmtree(folder)
        settle_disk()
    dist.barrier()
    return seconds


def training(side: PacelineSide, saves: Saves, steps: int, steps_per_save: int) -> dict[str, Any]:
    """Steps without saves, then as many with one after every `steps_per_save`; whether it was in flight beside each."""
    alone = []
    for _ in range(steps):
        alone.append(timed(lambda: side.run(1)))
    beside: list[tuple[float, bool]] = []
    began = len(saves.events)
    blocked = []
    for step in range(steps):
        if step % steps_per_save == 0:
            saves.saver.wait()
            saves.clear()
            blocked.append(timed(saves.save))
        in_flight = max(gather_objects(saves.saver.busy(), dist.group.WORLD))
        beside.append((timed(lambda: side.run(1)), in_flight))
    saves.saver.wait()
    durable = [event.seconds for event in saves.events[began:] if event.state == "durable"]
    saves.clear()
    return {"alone": alone, "beside": beside, "durable": durable, "blocked": blocked}


def main() -> None:
    with join_ranks() as rank:
        options = rank.options
        folder = Path(options["folder"])
        side = PacelineSide(rank)
        side.run(2)
        assert side.session.state is not None
        placed = side.session.state.placed()
        saves = Saves(rank, placed, folder / "ours")
        first, _ = saves.once()
        found: dict[str, Any] = {"first_blocked": first, "saves": [], "synced": [], "unsynced": [], "memcpy": []}
        stage = saves.saver._stage
        part = 0 if stage is None else stage.image.size_bytes
        state = state_dict(rank, placed)
        memory = []
        for number in range(options["rounds"]):
            found["saves"].append(saves.once())
            memory.append(memory_bytes("VmRSS"))
            found["memcpy"].append(memcpy_seconds(part, options["memcpys"]))
            found["synced"].append(library_seconds(rank, state, folder / f"synced-{number}", True))
            found["unsynced"].append(library_seconds(rank, state, folder / f"unsynced-{number}", False))
            rank.say(
                f"round {number + 1}: "
                + ", ".join(f"{key} {_last(found[key])}" for key in ("saves", "memcpy", "synced"))
            )
        for _ in range(3):
            saves.once()
        found["memory"] = gather_objects([memory[0], memory_bytes("VmRSS")], dist.group.WORLD)
        found["part_bytes"] = gather_objects(part, dist.group.WORLD)
        found["training"] = training(side, saves, options["steps"], options["steps_per_save"])
        saves.saver.close()
        found["checked"], found["unchecked"] = without_checksums(rank, placed, folder, options["rounds"])
        side.close()
        dist.barrier()
        rank.tell(found)


def without_checksums(
    rank: Rank, placed: Sequence[Placed], folder: Path, rounds: int
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Saves with and without checksums, in turn."""
    sides = [Saves(rank, placed, folder / name, command) for name, command in (("a", COMMAND), ("b", UNCHECKED))]
    for side in sides:
        side.once()
    found: list[list[tuple[float, float]]] = [[], []]
    for _ in range(rounds):
        for side, values in zip(sides, found, strict=True):
            values.append(side.once())
    for side in sides:
        side.saver.close()
    return found[0], found[1]


def _last(values: list[Any]) -> str:
    value = values[-1]
    return " ".join(f"{v:.3f}" for v in value) if isinstance(value, tuple) else f"{value:.3f}"


if __name__ == "__main__":
    main()

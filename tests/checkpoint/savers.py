"""Savers for tests: several ranks, or several hosts, in one process. A save needs no collective, so nothing blocks."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import HashStore

from paceline.checkpoint.boxes import Placement
from paceline.checkpoint.folders import list_steps, read_manifest
from paceline.checkpoint.messages import Event, KeepRule, SaveHead
from paceline.checkpoint.placed import Placed
from paceline.checkpoint.reader import read_whole
from paceline.checkpoint.saver import Saver
from paceline.checkpoint.storage import Storage, open_storage
from paceline.checkpoint.verify import verify

HOOKED = Path(__file__).with_name("hooked_writer.py")
ODD_SHAPES = {"a": (3, 5), "b": (7,), "c": (1,), "d": (129, 3), "e": (), "f": (0, 4)}


@dataclass
class World:
    """A place in a run of ranks that are all in this process."""

    rank: int
    world_size: int
    local_world_size: int
    store: Any

    @property
    def local_rank(self) -> int:
        return self.rank % self.local_world_size

    @property
    def node_rank(self) -> int:
        return self.rank // self.local_world_size


@dataclass
class Ranks:
    """The savers of all ranks."""

    place: str
    savers: list[Saver]
    tensors: list[dict[str, Tensor]]
    events: list[Event] = field(default_factory=list)

    @property
    def storage(self) -> Storage:
        return open_storage(self.place)

    @property
    def states(self) -> list[tuple[str, int]]:
        return [(event.state, event.step) for event in self.events]

    def save(self, step: int, **values: Any) -> None:
        self.each(lambda rank: self.savers[rank].save(head(step, **values), {"rank": rank}))

    def wait(self) -> None:
        self.each(lambda rank: self.savers[rank].wait())

    def each(self, call: Callable[[int], object]) -> None:
        """On all ranks at once; raises what rank 0, else the first other one, raised."""
        errors: dict[int, BaseException] = {}

        def run(rank: int) -> None:
            try:
                call(rank)
            except BaseException as error:
                errors[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(self.savers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[min(errors)]


def head(step: int, **values: Any) -> SaveHead:
    given = {"final": True, "samples": step * 8, "layout": {"dp": 1}, "state": {"lr": 0.1}, "about": {"model": "toy"}}
    return SaveHead(step=step, **{**given, **values})


@contextmanager
def ranks(
    place: Path | str,
    count: int = 1,
    *,
    hosts: int = 1,
    sharded: bool = False,
    tensors: dict[str, Tensor] | None = None,
    keep: int = 3,
    timeout: float = 20.0,
    command: Sequence[str] | None = None,
    **options: Any,
) -> Iterator[Ranks]:
    """`count` ranks on `hosts` hosts: replicas, or `sharded` by rows."""
    whole = tensors if tensors is not None else odd_tensors()
    store = HashStore()
    found = Ranks(str(place), [], [])
    for rank in range(count):
        own, placed = parts(whole, rank, count) if sharded else copies(whole)
        found.tensors.append(own)
        found.savers.append(
            Saver(
                storage_place=str(place),
                placed=placed,
                world=World(rank, count, count // hosts, store),
                run_id="run",
                attempt=1,
                keep=options.get("rule", KeepRule(keep=keep)),
                timeout_seconds=timeout,
                notify=found.events.append,
                **({} if command is None else {"command": command}),
            )
        )
    try:
        yield found
    finally:
        found.each(lambda rank: found.savers[rank].close())


def odd_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        **{f"model/{name}": torch.randn(shape, generator=generator) for name, shape in ODD_SHAPES.items()},
        "optimizer/exp_avg/a": torch.randn(3, 5, generator=generator).bfloat16(),
        "optimizer/step/a": torch.tensor(3, dtype=torch.int64),
    }


def copies(whole: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[Placed]]:
    own = {name: tensor.clone() for name, tensor in whole.items()}
    return own, [Placed(name, tensor, *Placement.whole(tensor.shape)) for name, tensor in own.items()]


def parts(whole: dict[str, Tensor], rank: int, count: int) -> tuple[dict[str, Tensor], list[Placed]]:
    """Rows of what has rows, copies of the rest, and a buffer that only this rank has."""
    own, placed = {}, []
    for name, tensor in whole.items():
        box, shape = Placement.rows(tensor.shape, rank, count) if tensor.dim() else Placement.whole(tensor.shape)
        begin = box.offset[0] if box.offset else 0
        own[name] = (tensor[begin : begin + box.shape[0]] if box.shape else tensor).clone()
        placed.append(Placed(name, own[name], box, shape))
    name = f"buffer/{rank}/count"
    own[name] = torch.full((rank + 1,), float(rank))
    placed.append(Placed(name, own[name], *Placement.whole((rank + 1,))))
    return own, placed


def hooked(*words: object) -> list[str]:
    """The command of a writer that misbehaves, see `hooked_writer.py`."""
    return [sys.executable, str(HOOKED), *map(str, words), "--"]


def saved(storage: Storage, step: int) -> dict[str, Tensor]:
    """All tensors of a checkpoint, after every byte of it was verified."""
    assert [finding.describe() for finding in verify(storage, step)] == []
    return dict(read_whole(storage, read_manifest(storage, step)))


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Bit for bit, names and types too."""
    return first.keys() == second.keys() and all(
        first[n].dtype == second[n].dtype and torch.equal(first[n], second[n]) for n in first
    )


def whole_steps(storage: Storage) -> list[int]:
    """The committed steps in which verification finds nothing."""
    return [step for step in list_steps(storage) if not verify(storage, step)]

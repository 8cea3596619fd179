"""A rank of a measurement: joins like a rank of a training, times blocks of calls, and tells what it found."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.bench.ranks import Tell
from paceline.bench.rows import drift_of, median_error
from paceline.bench.transport import log_to_file
from paceline.workers.heartbeat import beat
from paceline.workers.rendezvous import World, join, leave

COLLECTIVE_SECONDS = 240.0
"""After this a collective gives up; on a slow link the largest sizes take seconds."""

START_SECONDS = 300.0
"""All ranks must have come by then."""

BLOCK_SECONDS = 0.003
"""Calls are timed in blocks of at least this length: the ranks leave the barrier before it some 10 us apart."""

MAX_CALLS = 200
WARM_SECONDS = 0.1
MIN_ROUNDS, MAX_ROUNDS = 4, 40
WANTED_ERROR = 0.03
"""Of a median, as a share of it: no further rounds are made once it is known so well."""


@dataclass(frozen=True)
class Rank:
    """One rank: its world, what it was told to do, and where rank 0's records go."""

    world: World
    options: dict[str, Any]
    tell: Tell
    nccl_log: Path | None = None

    @property
    def backend(self) -> str:
        """`nccl`, `gloo` or another: what carries this rank's tensors."""
        device = self.world.device
        return "gloo" if device.type == "cpu" else str(dist.get_default_backend_for_device(device))


@contextmanager
def joined() -> Iterator[Rank]:
    """This process as a rank that `ranks.run_ranks` started."""
    given, told = (Path(word) for word in sys.argv[1:3])
    options = json.loads(given.read_text(encoding="utf-8"))
    with told.open("a", encoding="utf-8") as file:

        def tell(record: dict[str, Any]) -> None:
            file.write(json.dumps(record) + "\n")
            file.flush()

        with joined_with(options, tell) as rank:
            yield rank


@contextmanager
def joined_with(options: dict[str, Any], tell: Tell) -> Iterator[Rank]:
    """This process as one of the ranks that a launcher started; rank 0 alone calls `tell`."""
    log = log_to_file(os.environ) if torch.cuda.is_available() else None
    seconds = float(options.get("collective_seconds", COLLECTIVE_SECONDS))
    patience = float(options.get("start_seconds", START_SECONDS))
    world = join(seconds, start_timeout=patience, device_type=options.get("device"))
    try:
        yield Rank(world, options, tell if world.rank == 0 else lambda record: None, log)
    finally:
        leave(world)
        if log is not None:
            log.unlink(missing_ok=True)


def synchronise(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def meet() -> None:
    """All ranks go on from here together, to within tens of microseconds."""
    if dist.get_world_size() > 1:
        dist.all_reduce(torch.zeros(1))


def slowest(samples: list[float]) -> list[float]:
    """Of each sample the largest of all ranks: a call is done when the last rank has it."""
    if dist.get_world_size() == 1:
        return samples
    values = torch.tensor(samples, dtype=torch.float64)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return [float(v) for v in values.tolist()]


def clock(device: torch.device) -> Callable[[], float]:
    """Starts now; called, the seconds until the device has done what it was given since."""
    synchronise(device)
    began = time.perf_counter()

    def seconds() -> float:
        synchronise(device)
        return time.perf_counter() - began

    return seconds


class Timer:
    """Times one call of all ranks in rounds; all ranks make equally many, since they decide on shared samples.

    Args:
        warmup: calls before each round that are not timed; fewer where a call is long.
        iterations: calls of a round, one after the other, as nccl-tests make them; more where they are over at once. Fewer
            calls follow a barrier too closely: on a CPU a call of a millisecond then takes up to twice as long.
        seconds: longest time for all timed calls; at least one a round is made.
    """

    def __init__(
        self, call: Callable[[], None], device: torch.device, *, warmup: int, iterations: int, seconds: float
    ) -> None:
        self.rounds: list[list[float]] = []
        self._device = device
        self._seconds = seconds
        self._warmup = warmup
        self.call = call
        for _ in range(max(0, warmup - 1)):
            call()
        self._estimate = max(slowest([self._block(1)])[0], 1e-9)
        wanted = max(iterations, min(MAX_CALLS, math.ceil(BLOCK_SECONDS / self._estimate)))
        self.calls = max(1, min(wanted, int(seconds / MIN_ROUNDS / self._estimate)))

    @property
    def settled(self) -> bool:
        """Whether there are enough rounds: the median is known well, or the time is used up."""
        if len(self.rounds) < MIN_ROUNDS:
            return False
        spent = sum(seconds for one in self.rounds for seconds in one) * self.calls
        known = median_error(drift_of(self.rounds), len(self.rounds)) <= WANTED_ERROR
        return known or spent >= self._seconds or len(self.rounds) >= MAX_ROUNDS

    def round(self, call: Callable[[], None] | None = None) -> None:
        """Time a block of calls, of another of the same kind where one is given; every rank then knows the slowest's."""
        self.call = call or self.call
        for _ in range(max(1, min(self._warmup, int(WARM_SECONDS / self._estimate)))):
            self.call()
        self.rounds.append(slowest([self._block(self.calls)]))

    def settle(self) -> None:
        """Make rounds until there are enough."""
        while not self.settled:
            self.round()

    @property
    def samples(self) -> list[float]:
        """Seconds per call of every round so far."""
        return [seconds for one in self.rounds for seconds in one]

    def _block(self, calls: int) -> float:
        beat(0, "measuring")
        meet()
        seconds = clock(self._device)
        for _ in range(calls):
            self.call()
        return seconds() / calls

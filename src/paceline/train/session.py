"""What the loop needs to train any module: the step, its batches and its eval sets, made by `startup` or by a `Trainer`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.train.resume import Start
from paceline.train.state import TrainingState
from paceline.train.step import Batch, Forward, Loss, StepResult, TrainStep


class Batches(Protocol):
    """This rank's micro-batches, one list per optimizer step."""

    def __iter__(self) -> Iterator[list[Batch]]: ...
    def close(self) -> None: ...


class Keeping(Protocol):
    """What the loop offers each step to: it may save, and end the run early. See `keep.Keeper`."""

    def votes(self, step: int) -> tuple[float, ...]: ...
    def stops(self, step: int, result: StepResult) -> bool: ...
    def wants(self, step: int, result: StepResult, seconds: float, evals: Mapping[str, float] | None) -> bool: ...
    def save(self, step: int, evals: Mapping[str, float] | None) -> None: ...


@dataclass
class Session:
    """One attempt of a run on this rank.

    Attributes:
        model: the module as wrapped by the strategies.
        step: the owner of the optimizer step.
        batches: micro-batches of each step, from `start_step` on.
        evals: eval sets by name; each call gives this rank's batches anew.
        schedule: learning rate of a step (0 is the first).
        steps: the step at which the run ends.
        state: what must not be lost.
        start: what the attempt begins with; `start_step` is the step it begins after.
        keeper: saves the state; None where nothing is saved.
        restore_random: puts the random generators where they were at the save; called last before the first step.
        tokens_per_step, samples_per_step: over all ranks.
        flop_per_token, peak_flop_per_second: for MFU; 0 or None where unknown. The peak is one rank's.
        group: all ranks; None for one.
        counts_samples: whether this rank speaks for the samples that it reads; ranks that split a model read the same.
        part_of: what of a micro-batch this rank sees; less than all where ranks share its sequences.
        settle: gives back what forward passes without a backward left gathered.
        whole_weights: every parameter whole, by name in sorted order, one at a time; all ranks iterate alike.
        window_facts: what tells why this rank is slow, for its `window` records.
        in_step: whether a forward pass is a collective, which all ranks must run equally often.
        wait_for_all: a barrier on the host for phases that drift by more than a collective may wait.
    """

    model: nn.Module
    step: TrainStep
    forward: Forward
    loss: Loss
    batches: Batches
    evals: Mapping[str, Callable[[], Iterable[Batch]]]
    schedule: Callable[[int], float]
    steps: int
    tokens_per_step: int
    samples_per_step: int
    device: torch.device
    world_size: int = 1
    rank: int = 0
    state: TrainingState | None = None
    start: Start = field(default_factory=Start)
    keeper: Keeping | None = None
    restore_random: Callable[[], None] = lambda: None
    flop_per_token: float = 0.0
    peak_flop_per_second: float | None = None
    group: dist.ProcessGroup | None = None
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    wait_for_all: Callable[[], None] = lambda: None
    batch_needs_step: bool = False
    settle: Callable[[], None] = lambda: None
    whole_weights: Callable[[], Iterator[tuple[str, Tensor]]] = lambda: iter(())
    in_step: bool = False
    counts_samples: bool = True
    part_of: Callable[[Batch], Batch] = lambda batch: batch
    notes: list[str] = field(default_factory=list)
    window_facts: Callable[[], dict[str, Any]] = dict

    @property
    def start_step(self) -> int:
        return self.start.step

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes the run's lines."""
        return self.rank == 0

    def mfu(self, tokens_per_second: float) -> float | None:
        """Model FLOP utilisation: share of the measured matmul peak of all ranks."""
        if not self.peak_flop_per_second or not self.flop_per_token:
            return None
        return tokens_per_second * self.flop_per_token / (self.peak_flop_per_second * self.world_size)

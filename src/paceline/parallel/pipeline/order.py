"""The order in which each rank runs its passes: one list of actions per rank and schedule. Imports no torch.

The orders are those that torch's schedules run (a test holds them together), after

    gpipe             Huang et al. 2019, arXiv 1811.06965
    1f1b, interleaved Narayanan et al. 2021, arXiv 2104.04473
    zero-bubble       Qi et al. 2024, arXiv 2401.10241, ZB-H1 with any number of stages per rank
    zbv               the same, section 6

Letters: F forward, B backward, I its part for the stage's input, W its part for the stage's weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from paceline.parallel.pipeline.config import PipelineConfig
from paceline.parallel.pipeline.rules import rounds

Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """One pass of one micro-batch through one stage."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


def order(config: PipelineConfig, microbatches: int) -> list[list[Action]]:
    """The actions of every rank, in the order of their running."""
    return [order_of(config, rank, microbatches) for rank in range(config.ranks)]


def order_of(config: PipelineConfig, rank: int, microbatches: int) -> list[Action]:
    """The actions of one rank, in the order of their running."""
    actions = {
        "gpipe": _gpipe, "1f1b": _one_forward_one_backward, "interleaved-1f1b": _interleaved,
        "zero-bubble": _interleaved, "zbv": _v_shaped,
    }[config.schedule]  # fmt: skip
    return list(actions(config, rank, microbatches))


def _gpipe(config: PipelineConfig, rank: int, microbatches: int) -> Iterator[Action]:
    for kind in ("F", "B"):
        for microbatch in range(microbatches):
            yield Action(rank, kind, microbatch)


def _one_forward_one_backward(config: PipelineConfig, rank: int, microbatches: int) -> Iterator[Action]:
    """A stage runs ahead by as many forwards as there are stages after it; then one backward for each forward."""
    ahead = min(microbatches, config.ranks - 1 - rank)
    for microbatch in range(microbatches + ahead):
        if microbatch < microbatches:
            yield Action(rank, "F", microbatch)
        if microbatch >= ahead:
            yield Action(rank, "B", microbatch - ahead)


def _interleaved(config: PipelineConfig, rank: int, microbatches: int) -> Iterator[Action]:
    """A round of micro-batches goes through the first of the rank's stages, then through the next one.

    Backward passes go through the stages in reverse. Where they are split, gradients of weights wait for as many
    gradients of inputs as there are ranks before this one: ranks wait for the latter, and for the former nobody.
    """
    split = config.splits_backward
    length = microbatches // rounds(microbatches, config.ranks)
    passes = microbatches * config.stages_per_rank
    hops = config.ranks - 1 - rank
    ahead = min((config.stages_per_rank - 1) * length + (hops if split else 2 * hops), passes)
    weights_done = 0
    for number in range(passes + ahead):
        if number < passes:
            yield Action(*_place(config, rank, number, length, "F"))
        backwards = number - ahead
        if backwards < 0:
            continue
        yield Action(*_place(config, rank, backwards, length, "I" if split else "B"))
        if split and backwards >= rank:
            yield Action(*_place(config, rank, weights_done, length, "W"))
            weights_done += 1
    for number in range(weights_done, passes if split else 0):
        yield Action(*_place(config, rank, number, length, "W"))


def _place(config: PipelineConfig, rank: int, number: int, length: int, kind: Kind) -> tuple[int, Kind, int]:
    """Stage and micro-batch of a rank's pass of a kind, by its number."""
    turn, within = divmod(number, length)
    round_number, local = divmod(turn, config.stages_per_rank)
    if kind != "F":
        local = config.stages_per_rank - 1 - local
    return local * config.ranks + rank, kind, round_number * length + within


def _v_shaped(config: PipelineConfig, rank: int, microbatches: int) -> Iterator[Action]:
    """Two stages a rank: the first on the way down the V, the second on the way back up.

    The order is made for at least as many micro-batches as fill the V; those that are not there are left out.
    """
    full = max(2 * config.ranks - 1, microbatches)
    down, up = rank, config.num_stages - 1 - rank
    done: dict[tuple[int, str], int] = {}

    def next_of(stage: int, kind: Kind) -> Action:
        number = done.get((stage, kind), 0)
        done[stage, kind] = number + 1
        return Action(stage, kind, number)

    def runs() -> Iterator[Action]:
        hops = config.ranks - rank
        for _ in range(2 * hops - 1):
            yield next_of(down, "F")
        for _ in range(rank):
            yield next_of(up, "F")
            yield next_of(down, "F")
        for _ in range(hops):
            yield from (next_of(up, kind) for kind in ("F", "I", "W"))
        while done[up, "F"] < full:
            if done[down, "F"] < full:
                yield next_of(down, "F")
            yield from (next_of(down, kind) for kind in ("I", "W"))
            yield from (next_of(up, kind) for kind in ("F", "I", "W"))
        for _ in range(rank):
            yield next_of(down, "I")
            yield next_of(up, "I")
        for _ in range(hops):
            yield next_of(down, "I")
            yield next_of(down, "W")
        for stage in (up, down):
            while done.get((stage, "W"), 0) < full:
                yield next_of(stage, "W")

    for action in runs():
        if action.microbatch < microbatches:
            yield action

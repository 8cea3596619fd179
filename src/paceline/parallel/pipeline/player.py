"""Plays a schedule on a clock: how long a step takes, how long each rank waits, how many micro-batches are alive.

Each rank runs its actions in their order, each as soon as what it needs has arrived: a forward the output of the stage
before, a backward the gradient from the stage after, W its own I. Imports no torch.

Two things follow the engine (torch 2.13) and not the papers. Where backward passes are split, the first stage does
nothing at I, as no rank wants the gradient of its input, and all of its backward at W. And a micro-batch counts as alive
until the last part of its backward has run.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from paceline.parallel.pipeline.config import PipelineConfig
from paceline.parallel.pipeline.order import Action, order, order_of

_KEEPS = {"F": 1, "B": -1, "I": 0, "W": -1}
"""What a pass adds to the micro-batches that a stage keeps."""


class StageSeconds(msgspec.Struct, frozen=True):
    """Seconds of one micro-batch in one stage: forward, gradient of the input, gradients of the weights."""

    forward: float
    input_gradient: float
    weight_gradient: float

    @property
    def total(self) -> float:
        return self.forward + self.input_gradient + self.weight_gradient


class Played(msgspec.Struct, frozen=True):
    """An action with its time, in seconds from the beginning of the step."""

    action: Action
    begin: float
    end: float


class Play(msgspec.Struct, frozen=True):
    """A step, played. `alive` is the largest number of micro-batches that each rank keeps activations of at once, those
    of each of its stages counted."""

    step_seconds: float
    busy_seconds: tuple[float, ...]
    alive: tuple[int, ...]
    ranks: tuple[tuple[Played, ...], ...]

    @property
    def bubble(self) -> float:
        """Share of all ranks' time in which they wait."""
        return 1 - sum(self.busy_seconds) / (self.step_seconds * len(self.busy_seconds))


def play(
    config: PipelineConfig, microbatches: int, stages: Sequence[StageSeconds], transfer_seconds: float = 0.0
) -> Play:
    """Play one optimizer step.

    Args:
        stages: seconds of each stage.
        transfer_seconds: from the end of a pass to its arrival on another rank.

    Raises:
        ValueError: the order cannot run: every rank waits for another one.
    """
    if len(stages) != config.num_stages:
        raise ValueError(f"{len(stages)} stages for a pipeline of {config.num_stages}")
    lists = order(config, microbatches)
    ended: dict[Action, float] = {}
    clocks = [0.0] * config.ranks
    played: list[list[Played]] = [[] for _ in lists]
    waiting = sum(len(actions) for actions in lists)
    while waiting:
        before = waiting
        for rank, actions in enumerate(lists):
            while len(played[rank]) < len(actions):
                action = actions[len(played[rank])]
                ready = _arrival(action, ended, config, transfer_seconds)
                if ready is None:
                    break
                begin = max(ready, clocks[rank])
                clocks[rank] = ended[action] = begin + _seconds(action, stages[action.stage], config)
                played[rank].append(Played(action, begin, ended[action]))
                waiting -= 1
        if waiting == before:
            stuck = [
                str(actions[len(done)]) for actions, done in zip(lists, played, strict=True) if len(done) < len(actions)
            ]
            raise ValueError(f"every rank waits for another one, at {', '.join(stuck)}")
    return Play(
        step_seconds=max(clocks),
        busy_seconds=tuple(sum(p.end - p.begin for p in done) for done in played),
        alive=tuple(peak_kept(config, microbatches, rank, [1] * config.num_stages) for rank in range(config.ranks)),
        ranks=tuple(tuple(done) for done in played),
    )


def peak_kept(config: PipelineConfig, microbatches: int, rank: int, per_stage: Sequence[int]) -> int:
    """The most that a rank keeps at once between forward and backward passes.

    Args:
        per_stage: what one micro-batch keeps in each stage of the model.
    """
    return peaks_kept(config, microbatches, rank, [per_stage])[0]


def peaks_kept(config: PipelineConfig, microbatches: int, rank: int, kept: Sequence[Sequence[int]]) -> list[int]:
    """`peak_kept` of several things that micro-batches keep, each at its own moment."""
    now, most = [0] * len(kept), [0] * len(kept)
    for stage, kind, _ in order_of(config, rank, microbatches):
        turn = _KEEPS[kind]
        for number, per_stage in enumerate(kept):
            now[number] += turn * per_stage[stage]
            if now[number] > most[number]:
                most[number] = now[number]
    return most


def _seconds(action: Action, stage: StageSeconds, config: PipelineConfig) -> float:
    whole = stage.input_gradient + stage.weight_gradient
    if action.kind == "F":
        return stage.forward
    if action.kind == "B":
        return whole
    if action.stage == 0:
        return 0.0 if action.kind == "I" else whole
    return stage.input_gradient if action.kind == "I" else stage.weight_gradient


def _arrival(
    action: Action, ended: dict[Action, float], config: PipelineConfig, transfer_seconds: float
) -> float | None:
    """When all that an action needs is there; None while that is not known."""
    stage, kind, microbatch = action
    needs: list[Action] = []
    if kind == "F" and stage > 0:
        needs.append(Action(stage - 1, "F", microbatch))
    if kind in ("B", "I"):
        needs.append(Action(stage, "F", microbatch))
        if stage < config.num_stages - 1:
            needs.append(Action(stage + 1, kind, microbatch))
    if kind == "W":
        needs.append(Action(stage, "I", microbatch))
    arrivals = []
    for need in needs:
        if need not in ended:
            return None
        travels = config.rank_of(need.stage) != config.rank_of(stage)
        arrivals.append(ended[need] + (transfer_seconds if travels else 0.0))
    return max(arrivals, default=0.0)

"""Ranks that hold paceline and another side in the same processes and train them in turn, block by block.

Started by `launch.run_ranks` with the options

    other: handwritten, fully_shard, tensor, pipeline, accelerate or transformers
    precision, compile: of the other side
    block_steps, warmup_steps, budget: see `interleave`
"""

from __future__ import annotations

import importlib
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.pairs import Budget, bootstrap_median, first_goes_first, relative_difference, speed_ratios
from benchmarks.ranks import Rank, join_ranks
from benchmarks.recipe import recipe_of
from benchmarks.sides import PacelineSide, Side
from paceline.parallel.collectives import gather_objects
from paceline.parallel.compile.apply import recompiles

OTHERS = {
    "handwritten": "benchmarks.sides:HandwrittenSide",
    "tensor": "benchmarks.tensor_side:TensorSide",
    "pipeline": "benchmarks.pipeline_side:PipelineSide",
    "fully_shard": "benchmarks.sides:HandwrittenShardedSide",
    "accelerate": "benchmarks.peers.accelerate_side:AccelerateSide",
    "transformers": "benchmarks.peers.trainer_side:TrainerSide",
}


LOSS_PAIRS = 5
"""Pairs after which the sides' losses are compared: later, rounding alone parts equal curves (docs/log.md)."""


@dataclass
class Measured:
    """Seconds of each pair's blocks (first side, second side), the slowest rank's, and both sides' losses early on."""

    seconds: list[tuple[float, float]] = field(default_factory=list)
    losses: tuple[float, float] = (float("nan"), float("nan"))


def interleave(
    rank: Rank, sides: tuple[Side, Side], *, block_steps: int, warmup_steps: int, budget: Budget
) -> Measured:
    """Train both sides in turn: `warmup_steps` each unmeasured, then pairs of blocks until there are enough.

    Every rank takes the same decisions, since it takes them on the same numbers.
    """
    measured = Measured()
    for side in sides:
        began = time.perf_counter()
        side.run(warmup_steps)
        rank.say(f"{side.name}: {warmup_steps} steps to warm up, {time.perf_counter() - began:.1f} s")
    started = time.perf_counter()
    ratios: list[float] = []
    elapsed = 0.0
    while not budget.enough(ratios, elapsed):
        order = sides if first_goes_first(len(ratios)) else sides[::-1]
        spent = {side.name: _block(side, block_steps) for side in order}
        slowest = gather_objects(
            ((spent[sides[0].name], spent[sides[1].name]), time.perf_counter() - started), _world()
        )
        measured.seconds.append((max(s[0] for s, _ in slowest), max(s[1] for s, _ in slowest)))
        elapsed = max(e for _, e in slowest)
        ratios = speed_ratios(measured.seconds)
        rank.say(f"pair {len(ratios)}: {ratios[-1]:.3f}; median {bootstrap_median(ratios)}")
        if len(ratios) <= LOSS_PAIRS:
            measured.losses = (sides[0].last_loss(), sides[1].last_loss())
    return measured


def _block(side: Side, steps: int) -> float:
    dist.barrier()
    began = time.perf_counter()
    side.run(steps)
    return time.perf_counter() - began


def _world() -> dist.ProcessGroup | None:
    return dist.group.WORLD


def document(rank: Rank, paceline: PacelineSide, other: Side, measured: Measured, block_steps: int) -> dict[str, Any]:
    """What the program that started the ranks needs."""
    ratio = bootstrap_median(speed_ratios(measured.seconds))
    tokens = rank.resolved.tokens_per_step * block_steps
    session = paceline.session
    rates = [tokens / statistics.median(pair[k] for pair in measured.seconds) for k in (0, 1)]
    return {
        "sides": [paceline.name, other.name],
        "pairs": len(measured.seconds),
        "block_steps": block_steps,
        "seconds": measured.seconds,
        "ratio": {"median": ratio.median, "low": ratio.low, "high": ratio.high},
        "tokens_per_second": rates,
        "mfu": session.mfu(rates[0]),
        "peak_flop_per_second": session.peak_flop_per_second,
        "losses": list(measured.losses),
        "loss_difference": relative_difference(*measured.losses),
        "precision": rank.resolved.precision,
        "compile": rank.resolved.compile,
        "microbatch": rank.resolved.batch.microbatch,
        "accumulation": rank.resolved.batch.accumulation,
        "threads_per_rank": torch.get_num_threads(),
        "recompiles": recompiles() if rank.resolved.compile else 0,
    }


def other_side(rank: Rank) -> Side:
    """The side that the options name."""
    module, _, name = OTHERS[rank.options["other"]].partition(":")
    recipe = recipe_of(rank.resolved, rank.options["precision"], rank.options["compile"])
    side: Side = getattr(importlib.import_module(module), name)(rank, recipe)
    return side


def main() -> None:
    with join_ranks() as rank:
        options = rank.options
        paceline = PacelineSide(rank)
        other = other_side(rank)
        try:
            measured = interleave(
                rank, (paceline, other), block_steps=options["block_steps"], warmup_steps=options["warmup_steps"],
                budget=Budget(**options["budget"]),
            )  # fmt: skip
            rank.tell(document(rank, paceline, other, measured, options["block_steps"]))
        finally:
            other.close()
            paceline.close()


if __name__ == "__main__":
    main()

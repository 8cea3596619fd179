"""What a pipeline keeps and sends, and how long its steps would ideally take; derivations in docs/math/pipeline.md.

A stage sends the residual stream of each micro-batch to the next one and its gradient back. A rank keeps the activations
of as many micro-batches as its schedule has it run ahead. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.parallel.pipeline.config import AXIS, PipelineConfig
from paceline.parallel.pipeline.player import StageSeconds, play
from paceline.parallel.strategy import Collective, ParameterSize


def ideal_seconds(config: PipelineConfig, microbatches: int, rank_seconds: StageSeconds) -> float:
    """Length of a step of equal stages without transfers, where micro-batches are a multiple of the ranks.

    For `zbv` the three parts of a micro-batch must be equally long, and micro-batches at least twice the ranks; for
    `zero-bubble` the weights' part no longer than the other two together.

    Args:
        rank_seconds: of one micro-batch in all stages of a rank together.
    """
    hops = config.ranks - 1
    filled = microbatches * rank_seconds.total
    if config.schedule == "zero-bubble":
        wait = rank_seconds.forward + rank_seconds.input_gradient - rank_seconds.weight_gradient
        return filled + hops * wait / config.stages_per_rank
    if config.schedule == "zbv":
        return filled + hops * rank_seconds.forward / 2
    return filled + hops * rank_seconds.total / config.stages_per_rank


def peak_alive(config: PipelineConfig, microbatches: int, rank: int) -> int:
    """Micro-batches whose activations a rank keeps at once, those of each of its stages counted.

    For micro-batches that are a multiple of the ranks, and at least twice as many for `zbv`.
    """
    after = config.ranks - 1 - rank
    most = {
        "gpipe": microbatches,
        "1f1b": after + 1,
        "interleaved-1f1b": (config.stages_per_rank - 1) * config.ranks + 2 * after + 1,
        "zero-bubble": config.stages_per_rank * config.ranks,
        "zbv": 2 * config.ranks,
    }[config.schedule]
    return min(most, microbatches * config.stages_per_rank)


def describe_pipeline(config: PipelineConfig, microbatches: int) -> tuple[str, str]:
    """Blocks of each stage, and what the schedule makes of them were they equal."""
    bubble, alive = _equal_stages(config, microbatches)
    per_rank = f" x {config.stages_per_rank}" if config.stages_per_rank > 1 else ""
    return (
        " ".join(str(blocks) for blocks in config.layers),
        f"blocks of the {config.num_stages} stages of {config.ranks}{per_rank} ranks; {config.schedule} over {microbatches} "
        f"micro-batches waits {bubble:.0%} of a step of equal stages, and keeps up to "
        f"{alive} of them alive on a rank",
    )


def _equal_stages(config: PipelineConfig, microbatches: int) -> tuple[float, int]:
    """Bubble of equal stages, and the most micro-batches alive on a rank: by closed forms where they hold, else played."""
    full = 2 * config.ranks if config.schedule == "zbv" else config.ranks
    if microbatches % config.ranks == 0 and microbatches >= full:
        own = StageSeconds(*[float(config.stages_per_rank)] * 3)
        alive = max(peak_alive(config, microbatches, rank) for rank in range(config.ranks))
        return 1 - microbatches * own.total / ideal_seconds(config, microbatches, own), alive
    played = play(config, microbatches, [StageSeconds(1.0, 1.0, 1.0)] * config.num_stages)
    return played.bubble, max(played.alive)


def own_parameters(
    parameters: Sequence[ParameterSize], config: PipelineConfig, rank: int, tied: bool
) -> list[ParameterSize]:
    """The parameters that a rank holds, in the order of the model.

    Args:
        parameters: of the whole model; `unit` is their block. What stands before the blocks goes with the first stage,
            what stands after them with the last.
        tied: whether the first parameter is the output head's as well, which the last stage then holds too.
    """
    stages = config.stages_of(rank)
    blocks = {block for stage in stages for block in config.blocks_of(stage)}
    first_block = next(i for i, p in enumerate(parameters) if p.unit is not None)
    has_first, has_last = 0 in stages, config.num_stages - 1 in stages
    kept = []
    for index, parameter in enumerate(parameters):
        if parameter.unit is not None:
            keeps = parameter.unit in blocks
        elif index < first_block:
            keeps = has_first or (tied and has_last and index == 0)
        else:
            keeps = has_last
        if keeps:
            kept.append(parameter)
    return kept


def transfers(config: PipelineConfig, rank: int, microbatches: int, hidden_bytes: int) -> Collective:
    """What a rank sends to and receives from its neighbours in a step: activations one way, their gradients the other.

    Args:
        hidden_bytes: of the residual stream of one micro-batch.
    """
    borders = 0
    for stage in range(1, config.num_stages):
        ends = (config.rank_of(stage - 1), config.rank_of(stage))
        if ends[0] != ends[1]:
            borders += ends.count(rank)
    count = 2 * borders * microbatches
    return Collective("send_recv", AXIS, count, count * hidden_bytes, "nothing", "activations and their gradients")


def border_traffic(
    config: PipelineConfig, rank: int, microbatches: int, hidden_bytes: int, tied_bytes: int
) -> list[Collective]:
    """All that a rank exchanges with the other ranks of its pipeline in a step, but for what all ranks agree on.

    Args:
        tied_bytes: of this rank's part of the table's gradient where embeddings are tied; else 0.
    """
    found = [transfers(config, rank, microbatches, hidden_bytes)]
    return [*found, tied_gradients(config, rank, tied_bytes)] if tied_bytes else found


def tied_gradients(config: PipelineConfig, rank: int, size_bytes: int) -> Collective:
    """The sum of the gradients of a table that the first and the last stage hold alike."""
    ends = (config.rank_of(0), config.rank_of(config.num_stages - 1))
    meets = rank in ends and ends[0] != ends[1]
    return Collective("all_reduce", AXIS, int(meets), int(meets) * size_bytes, "nothing", "tied embeddings")

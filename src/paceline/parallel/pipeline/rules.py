"""What each schedule takes: stages per rank and micro-batches. Refused here, with numbers, before a process starts.

The rules are those of `torch.distributed.pipelining` (torch 2.13), and a test holds them against its own errors:

    gpipe             1 stage per rank, any number of micro-batches
    1f1b              1 stage per rank, at least as many micro-batches as stages
    interleaved-1f1b  2 or more stages per rank, micro-batches that divide into rounds of equal length
    zero-bubble       1 or more stages per rank, micro-batches that divide into rounds of equal length
    zbv               2 stages per rank, any number of micro-batches

A round is about as many micro-batches as ranks: `m` micro-batches on `p` ranks make max(1, m // p) rounds. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.errors import JobError
from paceline.parallel.config import ParallelSection
from paceline.parallel.layout import Layout
from paceline.parallel.pipeline.balance import balanced_layers
from paceline.parallel.pipeline.config import AXIS, DEFAULT_SCHEDULE, NO_PIPELINE, PipelineConfig, ScheduleName

SHOWN = 8
"""Valid numbers that an error lists."""


def rounds(microbatches: int, ranks: int) -> int:
    """Groups of micro-batches that the interleaved schedules take through all stages of a rank one after the other."""
    return max(1, microbatches // ranks)


def takes(schedule: ScheduleName, ranks: int, stages_per_rank: int, microbatches: int) -> bool:
    """Whether a schedule can run so many micro-batches."""
    if microbatches < 1:
        return False
    if schedule == "1f1b":
        return microbatches >= ranks * stages_per_rank
    if schedule in ("interleaved-1f1b", "zero-bubble"):
        return microbatches % rounds(microbatches, ranks) == 0
    return True


def config_takes(config: PipelineConfig, microbatches: int) -> bool:
    """Whether a resolved pipeline, or none, can run so many micro-batches."""
    return config.ranks == 1 or takes(config.schedule, config.ranks, config.stages_per_rank, microbatches)


def default_stages_per_rank(schedule: ScheduleName) -> int:
    return 2 if schedule in ("interleaved-1f1b", "zbv") else 1


def pipeline_config(
    parallel: ParallelSection, layout: Layout, layer_costs: list[float], is_set: Callable[[str], bool]
) -> PipelineConfig:
    """The settings that `[parallel]` asks for.

    Args:
        layer_costs: of each block, in the order of the model, those of the embedding and of the head counted with the
            first and the last one (`balance.layer_costs`).
        is_set: whether the user set a key.

    Raises:
        JobError: a key without effect, more stages than blocks, or stages that the schedule does not take.
    """
    if layout.pp == 1:
        _refuse_without_pipeline(parallel, is_set)
        return NO_PIPELINE
    schedule = parallel.pp_schedule or DEFAULT_SCHEDULE
    per_rank = parallel.pp_stages_per_rank or default_stages_per_rank(schedule)
    _check_stages_per_rank(schedule, per_rank)
    stages, blocks = layout.pp * per_rank, len(layer_costs)
    if stages > blocks:
        raise JobError(
            f"{layout.pp} ranks x {per_rank} stages = {stages} stages, and the model has {blocks} blocks",
            key=f"parallel.{AXIS}",
            values={"pp": layout.pp, "pp_stages_per_rank": per_rank, "stages": stages, "num_layers": blocks},
            hint=f"Set parallel.pp to at most {blocks // per_rank}"
            + (", or take fewer stages per rank." if per_rank > 1 else ", or model.num_layers to at least that."),
        )
    layers = balanced_layers(layer_costs, stages) if parallel.pp_layers is None else tuple(parallel.pp_layers)
    _check_layers(layers, stages, blocks)
    return PipelineConfig(schedule, layout.pp, per_rank, layers)


def check_microbatches(config: PipelineConfig, microbatches: int, per_rank: int) -> None:
    """Refuse a number of micro-batches that the schedule does not take.

    Args:
        microbatches: of one optimizer step, on each data rank.
        per_rank: sequences of one optimizer step on each data rank.

    Raises:
        JobError: with the numbers, and micro-batches that would do.
    """
    if config_takes(config, microbatches):
        return
    valid = [m for m in range(1, per_rank + 1) if per_rank % m == 0 and config_takes(config, m)]
    if config.schedule == "1f1b":
        reason = (
            f"1f1b takes at least as many micro-batches as stages, {config.num_stages}, and there are {microbatches}"
        )
    else:
        count = rounds(microbatches, config.ranks)
        reason = (
            f"{config.schedule} on {config.ranks} ranks takes {microbatches} micro-batches in {count} rounds, "
            f"which do not divide them"
        )
    sizes = [str(per_rank // m) for m in reversed(valid)][:SHOWN]
    raise JobError(
        reason,
        key="batch.microbatch",
        values={
            "microbatches": microbatches, "schedule": config.schedule, "pp": config.ranks,
            "stages": config.num_stages, "sequences_per_rank": per_rank, "valid_microbatches": valid,
        },
        hint=f"Set batch.microbatch to {' or '.join(sizes)} ({' or '.join(str(m) for m in valid[::-1][:SHOWN])} "
        f"micro-batches of the {per_rank} sequences per data rank), or take another parallel.pp_schedule."
        if valid
        else f"Raise batch.global_batch: {per_rank} sequences per data rank are too few for {config.num_stages} stages; "
        "or set parallel.pp_schedule=gpipe.",
    )  # fmt: skip


def check_transforms(config: PipelineConfig, compiled: bool, parameter_dtype: str, recompute: str) -> None:
    """Refuse what a backward pass in two parts cannot run over.

    Raises:
        JobError: compiled blocks, which have one backward; 16-bit weights whose gradients are summed in fp32, since the
            part for the weights puts them there in their own type; or recomputed blocks, since both parts would compute
            them again (torch refuses that in the middle of a step where some tensors are kept).
    """
    if config.ranks == 1 or not config.splits_backward:
        return
    for key, value, fine, reason in (
        ("compile", compiled, False, "compiled blocks have a backward in one part"),
        ("parameter_dtype", parameter_dtype, "fp32", "bf16 weights have fp32 gradients, set by a backward in one part"),
        ("recompute", recompute, "none", "blocks would be computed again in each part of the backward"),
    ):
        if value != fine:
            others = "1f1b, interleaved-1f1b or gpipe"
            raise JobError(
                f"{reason}, and {config.schedule} runs it in two",
                key=f"parallel.{key}",
                values={"pp_schedule": config.schedule, key: value},
                hint=f"Set parallel.{key}={str(fine).lower()}, or parallel.pp_schedule to {others}.",
            )


def check_sharding(parallel: ParallelSection, layout: Layout, is_set: Callable[[str], bool]) -> None:
    """Refuse what a pipeline cannot do with sharded weights, and with gradients.

    Raises:
        JobError: a stage of sharding, or a reduction, that belongs to one micro-batch.
    """
    if layout.pp == 1:
        return
    if is_set("parallel.overlap") and parallel.overlap:
        raise JobError(
            "has no effect under a pipeline, which reduces gradients after a rank's last backward pass",
            key="parallel.overlap",
            values={"overlap": True, "pp": layout.pp},
            hint="Remove it.",
        )
    if layout.dp_shard == 1:
        return
    why = "a pipeline needs the weights of a stage from the first pass of a step to its last"
    if parallel.zero_stage in (2, 3):
        raise JobError(
            f"stage {parallel.zero_stage} would gather weights anew for every pass of every micro-batch: {why}, and keeps "
            "them gathered",
            key="parallel.zero_stage",
            values={"zero_stage": parallel.zero_stage, "pp": layout.pp},
            hint="Set parallel.zero_stage=1, or remove it.",
        )
    if parallel.reduce_every == "microbatch":
        raise JobError(
            "gradients of a stage are reduced once a step under a pipeline, after its last backward pass",
            key="parallel.reduce_every",
            values={"reduce_every": "microbatch", "pp": layout.pp},
            hint="Remove it, or set parallel.reduce_every=step.",
        )


def _refuse_without_pipeline(parallel: ParallelSection, is_set: Callable[[str], bool]) -> None:
    for key in ("pp_schedule", "pp_stages_per_rank", "pp_layers"):
        if is_set(f"parallel.{key}") and getattr(parallel, key) is not None:
            raise JobError(
                "has no effect with pp = 1, which has one stage",
                key=f"parallel.{key}",
                values={key: getattr(parallel, key), "pp": 1},
                hint="Remove it, or set parallel.pp.",
            )


def _check_stages_per_rank(schedule: ScheduleName, per_rank: int) -> None:
    fault, valid = "", ""
    if schedule in ("gpipe", "1f1b") and per_rank != 1:
        fault, valid = "runs one stage per rank", "1, or parallel.pp_schedule to interleaved-1f1b or zero-bubble"
    elif schedule == "interleaved-1f1b" and per_rank < 2:
        fault, valid = "interleaves 2 or more stages per rank", "2 or more, or parallel.pp_schedule to 1f1b"
    elif schedule == "zbv" and per_rank != 2:
        fault, valid = "runs exactly 2 stages per rank", "2, or parallel.pp_schedule to zero-bubble"
    if fault:
        raise JobError(
            f"{schedule} {fault}, and {per_rank} are asked for",
            key="parallel.pp_stages_per_rank",
            values={"pp_stages_per_rank": per_rank, "pp_schedule": schedule},
            hint=f"Set parallel.pp_stages_per_rank to {valid}.",
        )


def _check_layers(layers: tuple[int, ...], stages: int, blocks: int) -> None:
    if len(layers) == stages and sum(layers) == blocks and min(layers) >= 1:
        return
    raise JobError(
        f"{list(layers)} are {len(layers)} stages with {sum(layers)} blocks; wanted are {stages} stages of at least one "
        f"block with {blocks} in all",
        key="parallel.pp_layers",
        values={"pp_layers": list(layers), "stages": stages, "num_layers": blocks},
        hint="Remove it: stages are balanced by cost.",
    )

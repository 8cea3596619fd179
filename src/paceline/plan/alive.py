"""Blocks of each stage, and how many micro-batches of each a rank of a pipeline keeps alive. Imports no torch.

After the papers: 1F1B, interleaved (Narayanan et al. 2021, arXiv 2104.04473), zero-bubble schedules whose limit is p or 2p
micro-batches on every rank (Qi et al. 2024, arXiv 2401.10241), DualPipeV. A test holds the first four to the schedules that
our own engine plays.
"""

from __future__ import annotations

from paceline.plan.setting import Setting


def stage_layers(setting: Setting) -> tuple[int, ...]:
    """Blocks of each stage of the model: as given, or as even as they go with the first and last stages short of some.

    What does not divide goes to the earlier stages, as the partitions of Megatron and DeepSpeed have it.
    """
    if setting.layers:
        return setting.layers
    stages = setting.layout.pp * setting.stages_per_rank
    if stages == 1:
        return (setting.spec.num_layers,)
    short = setting.first_layers + setting.last_layers
    usual, more = divmod(setting.spec.num_layers + short, stages)
    layers = [usual + (stage < more) for stage in range(stages)]
    layers[0] -= setting.first_layers
    layers[-1] -= setting.last_layers
    return tuple(max(0, blocks) for blocks in layers)


def stages_of(setting: Setting, rank: int) -> tuple[int, ...]:
    """The stages that a rank of the pipeline holds: they go around the ranks, or there and back in the shape of a V."""
    ranks, found = setting.layout.pp, []
    for turn in range(setting.stages_per_rank):
        back = setting.schedule in ("zbv", "dualpipev") and turn % 2
        found.append(turn * ranks + (ranks - 1 - rank if back else rank))
    return tuple(found)


def alive(setting: Setting, rank: int) -> tuple[int, ...]:
    """Micro-batches alive at once of each stage of a rank, at the moment when most are."""
    ranks, per_rank, count = setting.layout.pp, setting.stages_per_rank, setting.accumulation
    if ranks == 1:
        return (1,)
    after = ranks - 1 - rank
    schedule = "interleaved-1f1b" if setting.schedule == "1f1b" and per_rank > 1 else setting.schedule
    most = {
        "gpipe": count * per_rank,
        "1f1b": after + 1,
        "interleaved-1f1b": (per_rank - 1) * ranks + 2 * after + 1,
        "zero-bubble": per_rank * ranks,
        "zero-bubble-2p": per_rank * (2 * ranks - 1),
        "zbv": 2 * ranks,
        "dualpipev": 2 * ranks + 1,
    }[schedule]
    if schedule == "interleaved-1f1b":
        return _in_rounds(most, per_rank, min(ranks, count), count)
    return tuple(min(count, most // per_rank + (stage < most % per_rank)) for stage in range(per_rank))


def _in_rounds(most: int, stages: int, length: int, count: int) -> tuple[int, ...]:
    """`most` passes, given to the stages in turn in rounds of `length` micro-batches, at most `count` to each."""
    found, left, stage = [0] * stages, min(most, stages * count), 0
    while left > 0:
        taken = min(length, left, count - found[stage])
        found[stage] += taken
        left -= taken
        stage = (stage + 1) % stages
    return tuple(found)

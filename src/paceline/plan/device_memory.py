"""Memory of a training run from its configuration: by stage of the pipeline, the heaviest counts. Imports no torch.

Three figures are told apart, since "memory" in a report is one of them. *Allocated* is what tensors take at the peak of a
step: its standing part, and the largest of three moments: the loss, a block's backward, the update. *Reserved* is what the
allocator took from the device, which keeps what the other moments needed as well and rounds up. *Device* adds the context
and what the communication library holds.

A run of our own engine (software "paceline") is weighed by `parallel.memory.rank_memory`, which is exact. Any other by the
habits of its software (`memory_habits.toml`).
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import msgspec

from paceline.plan.alive import alive, stage_layers, stages_of
from paceline.plan.kept import BlockBytes, block_bytes, split_of
from paceline.plan.memory_habits import RESERVE_PRIOR, RESERVE_SIGMA, Habits, Kept, habits_of
from paceline.plan.own_memory import own_stages
from paceline.plan.setting import DeviceMemory, Setting, StageMemory
from paceline.plan.verdict import OWN_SIGMA, gathered_up, usable_bytes

OWN = "paceline"

Moment = Literal["loss", "backward", "update"]


class Elements(NamedTuple):
    """Numbers of parameters on one rank: all, one block, the largest tensor, tables (embedding and output head)."""

    total: float
    block: float
    largest: float
    tables: float


def predict_memory(setting: Setting, calibrated: bool = True) -> DeviceMemory:
    """The peak of the rank that needs most.

    Args:
        calibrated: with what the allocator adds as fitted to runs of this software generation; else with the prior of all.

    Raises:
        ValueError: more stages than blocks can fill.
    """
    if OWN in (setting.software, setting.memory_habits):
        return gathered_up(own_stages(setting), OWN_SIGMA[setting.device.kind], usable_bytes(setting))
    habits = habits_of(setting.memory_habits or setting.software, setting.precision)
    if not calibrated:
        sigma = math.hypot(habits.sigma, RESERVE_SIGMA)
        habits = msgspec.structs.replace(habits, reserve=RESERVE_PRIOR, sigma=sigma)
    block = block_bytes(setting, habits)
    layers = stage_layers(setting)
    if sum(layers) != setting.spec.num_layers:
        raise ValueError(f"{setting.spec.num_layers} blocks do not fill stages of {layers}")
    stages = tuple(_stage(setting, habits, block, layers, rank) for rank in candidates(setting, layers))
    return gathered_up(stages, habits.sigma, usable_bytes(setting))


def candidates(setting: Setting, layers: tuple[int, ...]) -> tuple[int, ...]:
    """Ranks of the pipeline of which one needs most: of those with equal blocks the first ones keep most alive."""
    held = [tuple(layers[stage] for stage in stages_of(setting, rank)) for rank in range(setting.layout.pp)]
    first_of = {held.index(blocks) for blocks in held}
    second_of = {held.index(blocks, 1) for blocks in held[1:]}
    return tuple(sorted(first_of | second_of | {0, len(held) - 1}))


def elements_of(setting: Setting, blocks: int, first: bool, last: bool) -> Elements:
    """Parameters of a rank of tp with so many blocks, the embedding's and the head's where it has them."""
    spec, tp = setting.spec, setting.layout.tp
    query, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    own_kv = max(1.0, spec.num_kv_heads / tp) * spec.head_dim
    largest_matrix = max(spec.dim * spec.ffn_dim, spec.dim * query) / tp
    matrices = spec.dim * (2 * query / tp + 2 * own_kv + (3 if spec.mlp == "swiglu" else 2) * spec.ffn_dim / tp)
    norm = spec.dim * (2 if spec.norm == "layernorm" and spec.bias else 1)
    vectors = 2 * norm
    if spec.bias or spec.qkv_bias:
        vectors += (query + 2 * kv) // tp
    if spec.bias:
        vectors += 2 * spec.dim + spec.ffn_dim // tp
    table = -(-spec.vocab_size // tp) * spec.dim
    count = int(first) + int(last and not (first and spec.tie_embeddings))
    positions = spec.max_sequence_length * spec.dim if first and spec.positions == "learned" else 0
    tables = count * table + positions
    return Elements(
        total=blocks * (matrices + vectors) + tables + (norm if last else 0),
        block=matrices + vectors if blocks else 0.0,
        largest=max(table if count else 0, largest_matrix if blocks else 0.0),
        tables=table if count else 0,
    )


def shards_of(setting: Setting) -> int:
    """Data ranks that share what ZeRO splits."""
    if setting.zero_stage == 0:
        return 1
    layout = setting.layout
    return layout.shards if layout.dp_shard > 1 else layout.dp * layout.cp


def _stage(setting: Setting, habits: Habits, block: BlockBytes, layers: tuple[int, ...], rank: int) -> StageMemory:
    stages = stages_of(setting, rank)
    first, last = 0 in stages, len(layers) - 1 in stages
    elements = elements_of(setting, sum(layers[s] for s in stages), first, last)
    standing = _standing(setting, habits, elements)
    counts = alive(setting, rank)
    kept = sum(count * layers[stage] for count, stage in zip(counts, stages, strict=True)) * block.kept
    kept += _ends(setting, habits, block, counts, last)
    extra: dict[Moment, float] = {
        "loss": _loss(setting, habits) if last else 0.0,
        "backward": (block.working if elements.block else 0.0) + _reduction(setting, habits, elements),
        "update": _update(setting, habits, elements),
    }
    return _summed(setting, habits, rank, standing, kept, extra)


def _standing(setting: Setting, habits: Habits, elements: Elements) -> dict[str, float]:
    """What a rank holds all the time, by part."""
    shards = shards_of(setting)

    def held(kept: Kept) -> float:
        split = setting.zero_stage >= kept.split_from
        return kept.size * elements.total / (shards if split else 1)

    gathered = _gathered(setting, habits, elements) if setting.zero_stage == 3 and shards > 1 else 0.0
    return {
        "parameters": held(habits.parameters), "gradients": held(habits.gradients), "master": held(habits.master),
        "moments": held(habits.moments), "gathered": gathered,
    }  # fmt: skip


def _gathered(setting: Setting, habits: Habits, elements: Elements) -> float:
    """Weights that stand whole under ZeRO-3: of a block, the next one and the tables. A pipeline's stage needs all of its
    own from the first pass of a step to the last, and sums its gradients whole until then."""
    number = split_of(setting, habits).number
    if setting.layout.pp > 1:
        return (number + habits.summed_bytes) * elements.total
    return number * min(habits.gathered_blocks * elements.block + elements.tables, elements.total)


def _ends(setting: Setting, habits: Habits, block: BlockBytes, counts: tuple[int, ...], last: bool) -> float:
    """Beside the blocks: token numbers, the last norm's and the head's input, and what a pipeline's stages hold on to."""
    tokens = setting.microbatch * setting.sequence_length // setting.layout.cp
    kept = 8.0 * tokens + (2 * block.stream * counts[-1] if last else 0.0)
    if setting.layout.pp > 1 and habits.stage_outputs:
        kept += sum(counts) * block.stream
    if setting.layout.pp > 1 and habits.all_logits and last:
        logits = tokens * math.ceil(setting.spec.vocab_size / setting.layout.tp)
        kept += setting.accumulation * logits * split_of(setting, habits).number
    return kept


def _loss(setting: Setting, habits: Habits) -> float:
    """Logits with all that the loss holds beside them at its peak."""
    tokens = setting.microbatch * setting.sequence_length // setting.layout.cp
    eager, compiled, split = habits.logit_bytes
    size = compiled if setting.compile else eager
    if setting.layout.tp > 1 and split:
        size = split
    whole = setting.loss_chunk_tokens or tokens
    kept = 0.0
    if setting.loss_chunk_tokens:
        kept = 4.0 * setting.spec.vocab_size * setting.spec.dim / setting.layout.tp
    return kept + min(whole, tokens) * math.ceil(setting.spec.vocab_size / setting.layout.tp) * size


def _reduction(setting: Setting, habits: Habits, elements: Elements) -> float:
    """Whole gradients on their way to the ranks that keep them: of a block or of a table, or a bucket of them."""
    if setting.layout.dp * setting.layout.cp == 1:
        return 0.0
    if setting.zero_stage == 3:
        return habits.reduced_bytes * max(elements.block, elements.tables)
    return min(habits.bucket_elements, elements.total) * habits.bucket_bytes


def _update(setting: Setting, habits: Habits, elements: Elements) -> float:
    """What an update needs beside the standing parts: a copy of gradients, and the norm of the largest tensor."""
    shards = shards_of(setting)
    step = habits.step.size * elements.total / (shards if setting.zero_stage >= habits.step.split_from else 1)
    normed = min(elements.largest, elements.total / shards) if habits.norm_split else elements.largest
    return step + habits.norm * normed


def _summed(
    setting: Setting, habits: Habits, rank: int, standing: dict[str, float], kept: float, extra: dict[Moment, float]
) -> StageMemory:
    """The three figures from what stands, what is kept for backward passes, and what each moment adds."""
    base = sum(standing.values())
    freed = standing["gradients"] if habits.gradients_freed and setting.accumulation == 1 else 0.0
    at: dict[Moment, float] = {
        "loss": base - freed + kept + extra["loss"],
        "backward": base + kept + extra["backward"],
        "update": base + extra["update"],
    }
    peak = max(at, key=lambda moment: at[moment])
    allocated = at[peak]
    all_moments = base + kept + sum(extra.values())
    reserved = (allocated + habits.phases_add * (all_moments - allocated)) * (1 + habits.reserve)
    communicators = habits.communicator_bytes * (len(setting.layout.split_axes()) + (setting.layout.world_size > 1))
    parts = {
        **standing,
        "gradients": standing["gradients"] - (freed if peak == "loss" else 0.0),
        "activations": 0.0 if peak == "update" else kept,
        "logits": extra["loss"] if peak == "loss" else 0.0,
        "buffers": extra[peak] if peak != "loss" else 0.0,
        "reserve": reserved - allocated,
        "context": habits.context_bytes,
        "communicators": communicators,
    }
    return StageMemory(
        stage=rank,
        parts={name: round(size) for name, size in parts.items()},
        peak=peak,
        allocated_bytes=round(allocated),
        reserved_bytes=round(reserved),
        device_bytes=round(reserved + habits.context_bytes + communicators),
    )

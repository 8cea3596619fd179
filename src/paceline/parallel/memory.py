"""Memory of one rank, by kind: what strategies keep, what activations need, what the process itself holds.

Imports no torch. `plan` prints it, `train` records it beside the measured peak and names its parts when memory runs out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from paceline.loss.cost import chunk_peak_bytes, chunked_kept_bytes
from paceline.model.flop import ActivationBytes, activation_bytes
from paceline.model.spec import ModelSpec, parameters
from paceline.optim.config import OptimizerSection
from paceline.optim.cost import moments_bytes
from paceline.parallel.batch import BatchPlan
from paceline.parallel.context.config import ContextConfig
from paceline.parallel.context.cost import exchange as context_exchange
from paceline.parallel.context.cost import kept_twice_bytes, transient_bytes
from paceline.parallel.control import control
from paceline.parallel.ddp.config import DdpConfig
from paceline.parallel.ddp.cost import cost as ddp_cost
from paceline.parallel.fsdp.config import FsdpConfig
from paceline.parallel.fsdp.cost import cost as fsdp_cost
from paceline.parallel.fsdp.cost import own_part
from paceline.parallel.layout import Layout
from paceline.parallel.offload.cost import resident_moments_bytes
from paceline.parallel.pipeline.config import NO_PIPELINE, PipelineConfig
from paceline.parallel.pipeline.cost import border_traffic, own_parameters
from paceline.parallel.pipeline.player import peaks_kept
from paceline.parallel.precision.config import ELEMENT_BYTES
from paceline.parallel.recompute.cost import peak_bytes
from paceline.parallel.registry import strategies
from paceline.parallel.strategy import Collective, Cost, ParameterSize, StateBytes, Work
from paceline.parallel.tensor.config import NO_TENSOR, TensorConfig, placement, rank_spec
from paceline.parallel.tensor.cost import exchange, partial_sums
from paceline.parallel.transforms import NO_TRANSFORMS, Transforms
from paceline.units import MiB

CONTEXT_BYTES = {"cpu": 320 * MiB, "cuda": 600 * MiB}
"""What a process holds before the model: the interpreter with torch imported (resident set of torch 2.13 on Linux), or a
CUDA context with its libraries. Measured on one machine each; docs/log.md."""

RESERVE_SHARE = {"cpu": 0.0, "cuda": 0.05}
"""Allocator slack as a share of the activations: caching allocators round up and fragment."""


DEFAULT_CONTEXT = ContextConfig()


class RankMemory(msgspec.Struct, frozen=True):
    """Bytes per rank at the peak of a step; gradients as kept between micro-batches.

    On a CPU `buffers_bytes` include the staging buffer of checkpoints.
    """

    parameters_bytes: int
    gradients_bytes: int
    moments_bytes: int
    master_bytes: int
    gathered_bytes: int
    activations_bytes: int
    logits_bytes: int
    buffers_bytes: int
    reserve_bytes: int
    context_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(msgspec.structs.asdict(self).values())

    @property
    def growth_bytes(self) -> int:
        """What is added to the process after its imports."""
        return self.total_bytes - self.context_bytes

    def to_record(self) -> dict[str, int]:
        return {**msgspec.structs.asdict(self), "total_bytes": self.total_bytes}


def parameter_sizes(spec: ModelSpec, element_bytes: int, tp: int = 1, tp_rank: int = 0) -> list[ParameterSize]:
    """Trainable parameters of a catalogue model in the module's order, as a rank of `tp` holds them before sharding."""
    return list(_parameter_sizes(spec, element_bytes, tp, tp_rank))


@lru_cache(maxsize=64)
def _parameter_sizes(spec: ModelSpec, element_bytes: int, tp: int, tp_rank: int) -> tuple[ParameterSize, ...]:
    boxes = [(p, placement(p, spec, tp, tp_rank).box.shape) for p in parameters(spec)]
    return tuple(ParameterSize(p.name, math.prod(s), element_bytes, rows=s[0], unit=p.layer) for p, s in boxes)


def layout_cost(
    sizes: Sequence[ParameterSize],
    layout: Layout,
    optimizer: OptimizerSection,
    ddp: DdpConfig,
    fsdp: FsdpConfig,
    accumulation: int,
    rank: int = 0,
    *,
    tensor: TensorConfig = NO_TENSOR,
    context: ContextConfig = DEFAULT_CONTEXT,
    pipeline: PipelineConfig = NO_PIPELINE,
    work: Work | None = None,
) -> Cost:
    """State bytes on a rank and collectives of the layout's strategies, for one optimizer step.

    Args:
        sizes: what the rank holds before sharding.
        rank: in the world; number 0 has most.
        tensor, context, pipeline: settings of `tp`, `cp` and `pp`, whose exchange is stated where the `work` is given,
            that of the whole model.
    """
    at = layout.coordinates(rank)
    shard_rank = at["dp_shard"] * layout.cp + at["cp"] if layout.shards > 1 else 0
    if "fsdp" in strategies(layout):
        cost = fsdp_cost(sizes, optimizer, layout, fsdp, accumulation, shard_rank)
    else:
        elements = sum(p.elements for p in sizes)
        width = sizes[0].element_bytes if sizes else 4
        cost = ddp_cost(sizes, moments_bytes(optimizer, elements, len(sizes), width), layout, ddp)
    collectives = [*cost.collectives, *control(layout)]
    if work is not None:
        held = {p.name: own_part(p, layout.shards, shard_rank) * p.element_bytes for p in sizes}
        collectives += _exchanges(work, layout, at["pp"], held, tensor, context, pipeline)
    return msgspec.structs.replace(cost, collectives=tuple(c for c in collectives if c.count))


def _exchanges(
    work: Work,
    layout: Layout,
    pp_rank: int,
    held_bytes: dict[str, int],
    tensor: TensorConfig,
    context: ContextConfig,
    pipeline: PipelineConfig,
) -> list[Collective]:
    """What travels between ranks that read the same samples."""
    stages = pipeline.stages_of(pp_rank)
    whole, first, last = work, 0 in stages, pipeline.num_stages - 1 in stages
    if layout.pp > 1:
        blocks = sum(pipeline.layers[stage] for stage in stages)
        work = msgspec.structs.replace(work, spec=msgspec.structs.replace(work.spec, num_layers=blocks))
    found = context_exchange(work, layout, context)
    if tensor.degree > 1:
        found += exchange(work, tensor, layout.cp, embeds=first, ends=last)
        found += partial_sums(whole.spec, tensor, held_bytes)
    if layout.pp > 1:
        tied = next(iter(held_bytes.values())) if whole.spec.tie_embeddings and (first or last) else 0
        tokens = work.microbatch * work.sequence_length // layout.cp
        stream = tokens * work.spec.dim * work.stream_bytes // (tensor.degree if tensor.sequence_parallel else 1)
        found += border_traffic(pipeline, pp_rank, work.accumulation, stream, tied)
    return found


def work_of(
    spec: ModelSpec, batch: BatchPlan, sequence_length: int, precision: str, transforms: Transforms = NO_TRANSFORMS
) -> Work:
    """What a rank computes in a step."""
    return Work(
        spec, batch.microbatch, batch.accumulation, sequence_length, ELEMENT_BYTES[precision],
        2 if transforms.parameter_dtype == "bf16" else weight_bytes(precision), transforms.recompute,
        transforms.loss_chunk_tokens, half=precision == "fp16",
    )  # fmt: skip


def weight_bytes(precision: str) -> int:
    """Of one weight as the optimizer has it."""
    return 8 if precision == "fp64" else 4


def rank_memory(
    spec: ModelSpec,
    layout: Layout,
    batch: BatchPlan,
    optimizer: OptimizerSection,
    ddp: DdpConfig,
    fsdp: FsdpConfig,
    *,
    sequence_length: int,
    precision: str,
    device_kind: str,
    transforms: Transforms = NO_TRANSFORMS,
    tensor: TensorConfig = NO_TENSOR,
    context: ContextConfig = DEFAULT_CONTEXT,
    pipeline: PipelineConfig = NO_PIPELINE,
    pp_rank: int = 0,
    states: dict[tuple[int, bool, bool], tuple[StateBytes, int]] | None = None,
) -> RankMemory:
    """Memory of each rank for a catalogue model under a layout; under a pipeline, of those with the stages of `pp_rank`.

    Args:
        states: what ranks keep by their blocks and ends, for callers that ask for all ranks of a pipeline.
    """
    element_bytes = weight_bytes(precision)
    alike = _ends(pipeline, pp_rank)
    states = {} if states is None else states
    if alike not in states:
        # The last rank has most rows of a vocabulary that does not divide.
        sizes = parameter_sizes(spec, element_bytes, tensor.degree, tensor.degree - 1)
        if layout.pp > 1:
            sizes = own_parameters(sizes, pipeline, pp_rank, spec.tie_embeddings)
        states[alike] = layout_cost(sizes, layout, optimizer, ddp, fsdp, batch.accumulation).state, len(sizes)
    state, tensors = states[alike]
    staging = staging_bytes(state, layout) if device_kind == "cpu" else 0
    state = transformed_state(state, transforms, tensors, element_bytes)
    alive = _alive(pipeline, batch.accumulation, pp_rank)
    # One model of as many blocks as are alive at once, whichever micro-batch they are of.
    spec = msgspec.structs.replace(spec, num_layers=spec.num_layers if layout.pp == 1 else alive.blocks)
    compute_bytes = ELEMENT_BYTES[precision]
    work = work_of(spec, batch, sequence_length, precision, transforms)
    attending = transient_bytes(work, layout, context) + kept_twice_bytes(work, layout, context)
    spec = rank_spec(spec, tensor.degree)
    activations = activation_bytes(
        spec, batch.microbatch, sequence_length, compute_bytes, recompute=transforms.recompute,
        stream_ranks=tensor.degree if tensor.sequence_parallel else 1, sequence_ranks=layout.cp,
        residual_bytes=2 if transforms.parameter_dtype == "bf16" else element_bytes,
        blocks_in_dtype="fsdp" in strategies(layout) and fsdp.gather_dtype is not None,
    )  # fmt: skip
    tokens = batch.microbatch * sequence_length // layout.cp
    logits = loss_peak_bytes(spec, activations, tokens, compute_bytes, transforms.loss_chunk_tokens)
    if layout.pp > 1:
        activations, logits = _of_stages(activations, logits, alive)
    kept = peak_bytes(activations, transforms.recompute, logits) + attending
    return RankMemory(
        parameters_bytes=state.parameters,
        gradients_bytes=state.gradients,
        moments_bytes=state.moments,
        master_bytes=state.master,
        gathered_bytes=state.gathered,
        activations_bytes=kept,
        logits_bytes=logits,
        buffers_bytes=state.buffers + staging,
        reserve_bytes=round(RESERVE_SHARE[device_kind] * (kept + logits)),
        context_bytes=CONTEXT_BYTES[device_kind],
    )


def _ends(pipeline: PipelineConfig, pp_rank: int) -> tuple[int, bool, bool]:
    """What tells the state of a rank of a pipeline from that of others: its blocks, and whether it has an end."""
    stages = pipeline.stages_of(pp_rank)
    blocks = sum(pipeline.layers[stage] for stage in stages) if pipeline.layers else 0
    return blocks, 0 in stages, pipeline.num_stages - 1 in stages


class _Alive(NamedTuple):
    """What a rank keeps at once under a pipeline: blocks of all micro-batches, micro-batches, and those before the loss."""

    blocks: int
    microbatches: int
    ends: int


@lru_cache(maxsize=4096)
def _alive(pipeline: PipelineConfig, microbatches: int, pp_rank: int) -> _Alive:
    if pipeline.ranks == 1:
        return _Alive(0, 1, 1)
    last = [0] * (pipeline.num_stages - 1) + [1]
    counts = (pipeline.layers, [1] * pipeline.num_stages, last)
    return _Alive(*peaks_kept(pipeline, microbatches, pp_rank, counts))


def _of_stages(activations: ActivationBytes, logits: int, alive: _Alive) -> tuple[ActivationBytes, int]:
    """Activations and logits of a rank of a pipeline: tables of each micro-batch, the head's where a stage ends in it."""
    kept = activations._replace(
        tables=activations.tables * alive.microbatches,
        head=activations.head * alive.ends,
        logits_and_loss=activations.logits_and_loss * alive.ends,
    )
    waiting = max(0, alive.ends - 1) * activations.logits_and_loss
    return kept, logits + waiting if alive.ends else 0


def stage_memories(
    spec: ModelSpec,
    layout: Layout,
    batch: BatchPlan,
    optimizer: OptimizerSection,
    ddp: DdpConfig,
    fsdp: FsdpConfig,
    *,
    pipeline: PipelineConfig,
    **settings: Any,
) -> list[RankMemory]:
    """`rank_memory` of each rank of a pipeline; one where there is none."""
    states: dict[tuple[int, bool, bool], tuple[StateBytes, int]] = {}
    return [
        rank_memory(
            spec, layout, batch, optimizer, ddp, fsdp, pipeline=pipeline, pp_rank=pp_rank, states=states, **settings
        )
        for pp_rank in range(pipeline.ranks)
    ]


def heaviest(stages: Sequence[RankMemory]) -> int:
    """Index of the stage that needs most."""
    return max(range(len(stages)), key=lambda index: stages[index].total_bytes)


def staging_bytes(state: StateBytes, layout: Layout) -> int:
    """Host memory into which a rank copies its part of a checkpoint, allocated once.

    What several ranks hold alike is saved by one of them, each in its turn. Beside a GPU this is not the device's memory.
    """
    return -(-(state.parameters + state.moments) // layout.replicas)


def transformed_state(state: StateBytes, transforms: Transforms, tensors: int, element_bytes: int) -> StateBytes:
    """State as the transforms leave it: bf16 weights beside their masters, and moments that are elsewhere."""
    elements = state.moments // (2 * element_bytes)
    place = transforms.offload.place
    moments = resident_moments_bytes(state.moments, elements, tensors, element_bytes, place)
    if transforms.parameter_dtype == "bf16":
        state = msgspec.structs.replace(state, parameters=state.parameters // 2, master=state.parameters)
    return msgspec.structs.replace(state, moments=moments)


def loss_peak_bytes(
    spec: ModelSpec, activations: ActivationBytes, tokens: int, compute_bytes: int, chunk_tokens: int
) -> int:
    """Logits and what the loss needs beside them, at its peak: whole, or a chunk of them with the head's gradient."""
    if chunk_tokens:
        kept = chunked_kept_bytes(spec.vocab_size, spec.dim, max(4, compute_bytes))
        return kept + chunk_peak_bytes(chunk_tokens, spec.vocab_size, compute_bytes)
    # The loss's backward pass makes the logits' gradient while the logits are still there.
    return activations.logits_and_loss + tokens * spec.vocab_size * compute_bytes

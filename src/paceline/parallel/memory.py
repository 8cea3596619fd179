"""Memory of one rank, by kind: what strategies keep, what activations need, what the process itself holds.

Imports no torch. `plan` prints it, `train` records it beside the measured peak and names its parts when memory runs out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from paceline.loss.cost import chunk_peak_bytes, chunked_kept_bytes
from paceline.model.flop import ActivationBytes, activation_bytes
from paceline.model.spec import ModelSpec, parameters
from paceline.optim.config import OptimizerSection
from paceline.optim.cost import moments_bytes
from paceline.parallel.batch import BatchPlan
from paceline.parallel.ddp.config import DdpConfig
from paceline.parallel.ddp.cost import cost as ddp_cost
from paceline.parallel.fsdp.config import FsdpConfig
from paceline.parallel.fsdp.cost import cost as fsdp_cost
from paceline.parallel.layout import Layout
from paceline.parallel.offload.cost import resident_moments_bytes
from paceline.parallel.precision.config import ELEMENT_BYTES
from paceline.parallel.recompute.cost import peak_bytes
from paceline.parallel.registry import strategies
from paceline.parallel.strategy import Cost, ParameterSize, StateBytes
from paceline.parallel.transforms import NO_TRANSFORMS, Transforms
from paceline.units import MiB

CONTEXT_BYTES = {"cpu": 320 * MiB, "cuda": 600 * MiB}
"""What a process holds before the model: the interpreter with torch imported (resident set of torch 2.13 on Linux), or a
CUDA context with its libraries. Measured on one machine each; docs/log.md."""

RESERVE_SHARE = {"cpu": 0.0, "cuda": 0.05}
"""Allocator slack as a share of the activations: caching allocators round up and fragment."""


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


def parameter_sizes(spec: ModelSpec, element_bytes: int) -> list[ParameterSize]:
    """Trainable parameters of a catalogue model in the module's order."""
    return [
        ParameterSize(p.name, math.prod(p.shape), element_bytes, rows=p.shape[0], unit=p.layer)
        for p in parameters(spec)
    ]


def layout_cost(
    sizes: Sequence[ParameterSize],
    layout: Layout,
    optimizer: OptimizerSection,
    ddp: DdpConfig,
    fsdp: FsdpConfig,
    accumulation: int,
    rank: int = 0,
) -> Cost:
    """State bytes on a rank (rank 0 has most) and collectives of the layout's strategies, for one optimizer step."""
    if "fsdp" in strategies(layout):
        return fsdp_cost(sizes, optimizer, layout, fsdp, accumulation, rank % layout.dp_shard)
    elements = sum(p.elements for p in sizes)
    width = sizes[0].element_bytes if sizes else 4
    return ddp_cost(sizes, moments_bytes(optimizer, elements, len(sizes), width), layout, ddp)


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
) -> RankMemory:
    """Memory of each rank for a catalogue model under a data-parallel layout."""
    element_bytes = 8 if precision == "fp64" else 4
    state = layout_cost(parameter_sizes(spec, element_bytes), layout, optimizer, ddp, fsdp, batch.accumulation).state
    staging = staging_bytes(state, layout) if device_kind == "cpu" else 0
    state = transformed_state(state, transforms, len(parameters(spec)), element_bytes)
    compute_bytes = ELEMENT_BYTES[precision]
    activations = activation_bytes(
        spec, batch.microbatch, sequence_length, compute_bytes, recompute=transforms.recompute,
        residual_bytes=2 if transforms.parameter_dtype == "bf16" else element_bytes,
        blocks_in_dtype="fsdp" in strategies(layout) and fsdp.gather_dtype is not None,
    )  # fmt: skip
    tokens = batch.microbatch * sequence_length
    logits = loss_peak_bytes(spec, activations, tokens, compute_bytes, transforms.loss_chunk_tokens)
    kept = peak_bytes(activations, transforms.recompute, logits)
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


def staging_bytes(state: StateBytes, layout: Layout) -> int:
    """Host memory into which a rank copies its part of a checkpoint, allocated once.

    What several ranks hold alike is saved by one of them, each in its turn. Beside a GPU this is not the device's memory.
    """
    return -(-(state.parameters + state.moments) // layout.dp_replicate)


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

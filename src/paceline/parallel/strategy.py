"""What a strategy states about itself: the bytes it keeps and the collectives it runs. Pure arithmetic, no torch.

A strategy is a package `parallel/<name>/` with `config.py` (its axes and settings), `cost.py` (the statement below) and
`apply.py` (the torch change). The conformance suite holds the statement against what really ran.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from paceline.model.flop import Recompute
from paceline.model.spec import ModelSpec

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv"]


class ParameterSize(msgspec.Struct, frozen=True):
    """A parameter as the cost model sees it, in the module's order.

    `rows` is the length of its first dim (0: it has no dims), `unit` the block that it belongs to (None: outside of all
    blocks). Frozen ones are not `trainable`.
    """

    name: str
    elements: int
    element_bytes: int
    rows: int = 1
    unit: int | None = None
    trainable: bool = True

    @property
    def size_bytes(self) -> int:
        return self.elements * self.element_bytes


class Collective(msgspec.Struct, frozen=True):
    """A collective of one optimizer step: `count` calls that carry `size_bytes` in all on each rank.

    Bytes are counted as nccl-tests does: those of the whole tensor, an all-gather's output and a reduce-scatter's input.
    """

    kind: CollectiveKind
    axis: str
    count: int
    size_bytes: int
    overlaps: Literal["backward", "forward", "nothing"]
    purpose: str


class StateBytes(msgspec.Struct, frozen=True):
    """Bytes that one rank keeps, by kind. `gathered` are whole copies of split weights, `buffers` what only helps."""

    parameters: int
    gradients: int
    moments: int
    master: int = 0
    gathered: int = 0
    buffers: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.moments + self.master + self.gathered + self.buffers


class Work(msgspec.Struct, frozen=True):
    """What a rank computes in an optimizer step, for strategies whose exchange depends on it.

    `stream_bytes` are those of a number between blocks, `compute_bytes` those in products (`half`: of float16);
    `sequence_length` is whole.
    """

    spec: ModelSpec
    microbatch: int
    accumulation: int
    sequence_length: int
    compute_bytes: int
    stream_bytes: int
    recompute: Recompute = "none"
    loss_chunk_tokens: int = 0
    half: bool = False


class Cost(msgspec.Struct, frozen=True):
    """A strategy's statement for one optimizer step.

    `state` is what is held at the peak of a step, gradients as kept between micro-batches; `at_rest` what is left
    between two steps and `in_window` what is left between two micro-batches, where they differ from it.
    """

    state: StateBytes
    collectives: tuple[Collective, ...]
    at_rest: StateBytes | None = None
    in_window: StateBytes | None = None


def total_bytes(parameters: Sequence[ParameterSize]) -> int:
    return sum(p.size_bytes for p in parameters)

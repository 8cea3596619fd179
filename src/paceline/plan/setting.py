"""All that a prediction rests on, whoever's run it is: a job of ours, or a published run of another system. No torch."""

from __future__ import annotations

from typing import Literal

import msgspec

from paceline.cluster.device import Device, Link, ProductType
from paceline.cluster.measured import Fit
from paceline.model.flop import Recompute
from paceline.model.spec import ModelSpec
from paceline.optim.config import OptimizerSection
from paceline.parallel.ddp.config import DdpConfig
from paceline.parallel.layout import Layout
from paceline.parallel.memory import weight_bytes
from paceline.parallel.offload.config import NO_OFFLOAD, OffloadConfig
from paceline.parallel.precision.config import ELEMENT_BYTES
from paceline.plan.software import OWN

Schedule = Literal["gpipe", "1f1b", "interleaved-1f1b", "zero-bubble", "zero-bubble-2p", "zbv", "dualpipev"]


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One run's configuration.

    nodes, devices_per_node: of equal devices; ranks fill a node before the next, in the order of the layout's axes.
    link: between devices of a node; fabric: between nodes, bytes/s of one device; None where there is only one.
    precision: element type of the products. zero_stage: 0 where nothing is sharded over the data ranks.
    stages_per_rank: of an interleaved schedule. first_layers, last_layers: blocks fewer on the first and last stage.
    layers: blocks of each stage of the model, where they are known; else they are as even as they go.
    parameter_dtype, offload, ddp, optimizer: as a job of ours sets them.
    fused_attention: scores are never written to memory. software: key of the software generation (`plan/software`).
    fits: measured times of collectives of this very cluster; what they cover they say better than link and fabric.
    recipe: how numbers of 8 and 4 bits are scaled, where the source says. gradient_bytes: of an element on the wire between
        data ranks; 0: as the generation does. tensor_overlap: tensor exchanges run beside products; None: as it does.
    recomputed: what `selective` computes anew. recomputed_layers: the share of blocks that `full` covers.
    memory_habits: key of what the software keeps (`plan/memory_habits.toml`) where it is not that of `software`.
    assumed: what the source does not say and was assumed, in words, each with its reason.
    """

    name: str
    spec: ModelSpec
    device: Device
    nodes: int
    devices_per_node: int
    link: Link | None
    fabric: Link | None
    layout: Layout
    microbatch: int
    accumulation: int
    sequence_length: int
    precision: ProductType = "bf16"
    recompute: Recompute = "none"
    zero_stage: Literal[0, 1, 2, 3] = 0
    schedule: Schedule = "1f1b"
    stages_per_rank: int = 1
    first_layers: int = 0
    last_layers: int = 0
    sequence_parallel: bool = False
    context_method: Literal["gather", "alltoall", "ring"] = "gather"
    fused_attention: bool = True
    compile: bool = False
    loss_chunk_tokens: int = 0
    reduce_every_microbatch: bool = False
    recipe: Literal["", "tensorwise", "rowwise", "mx"] = ""
    recomputed: Literal["elementwise", "attention", "every other product", "mlp"] = "elementwise"
    recomputed_layers: float = 1.0
    gradient_bytes: int = 0
    tensor_overlap: bool | None = None
    software: str = "paceline"
    memory_habits: str = ""
    layers: tuple[int, ...] = ()
    parameter_dtype: Literal["fp32", "bf16"] = "fp32"
    offload: OffloadConfig = NO_OFFLOAD
    ddp: DdpConfig = DdpConfig()
    optimizer: OptimizerSection = OptimizerSection()
    fits: tuple[Fit, ...] = ()
    assumed: tuple[str, ...] = ()

    @property
    def global_batch(self) -> int:
        """Sequences per optimizer step."""
        return self.layout.dp * self.microbatch * self.accumulation

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.sequence_length


def element_bytes(setting: Setting) -> tuple[int, int]:
    """Bytes of a number in products, and of one between blocks. Other systems keep both in 16 bit."""
    if setting.software != OWN:
        return 2, 2
    product = ELEMENT_BYTES.get(setting.precision, 2)
    return product, 2 if setting.parameter_dtype == "bf16" else weight_bytes(setting.precision)


class StepTime(msgspec.Struct, frozen=True):
    """Predicted seconds of one optimizer step.

    `parts` add up to `seconds`; their names are those of the report (`run.records.PARTS`). `detail` splits them further
    (by operation and by collective, with what was hidden), for explanation only. The true step lies between `p10` and
    `p90` with a probability of 80%.
    """

    seconds: float
    p10: float
    p90: float
    parts: dict[str, float]
    detail: dict[str, float]


class StageMemory(msgspec.Struct, frozen=True):
    """Bytes of the ranks that hold one place of the pipeline: parts, and the three sums of `DeviceMemory`.

    `parts` add up to `device_bytes`. `peak` is the moment of the step at which most is allocated.
    """

    stage: int
    parts: dict[str, int]
    peak: Literal["loss", "backward", "update"]
    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int


class DeviceMemory(msgspec.Struct, frozen=True):
    """Predicted peak of the rank that needs most, in bytes.

    allocated: of tensors. reserved: what the allocator took for them. device: what the device reports as used, with the
    context and the buffers of communicators. Each lies within its `spread` (P10 and P90 as shares of the figure) for 80%
    of runs; `oom_probability` is that of needing more than the device has.
    `stages` are the places of the pipeline that were weighed, `stage` the one that needs most.
    """

    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    device_p10_bytes: int
    device_p90_bytes: int
    parts: dict[str, int]
    stage: int
    spread: tuple[float, float] = (1.0, 1.0)
    oom_probability: float = 0.0
    stages: tuple[StageMemory, ...] = ()

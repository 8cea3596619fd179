"""`[parallel]` and `[batch]`: how the work is split over ranks, and what the global batch is."""

from typing import Annotated, Literal

from msgspec import Meta

from paceline.config import AUTO, Section
from paceline.units import Bytes, Count

Degree = Annotated[int, Meta(ge=-1)]


class ParallelSection(Section, frozen=True):
    """Degrees of the mesh axes, precision of the arithmetic and of the reduction, compilation."""

    layout: Annotated[
        Literal["given", "auto"],
        Meta(
            description="given: the degrees below. auto: the planner's choice for the ranks that run, as `paceline plan` "
            "finds it; degrees and settings that you write are kept."
        ),
    ] = "given"
    dp_replicate: Annotated[Degree, Meta(description="Replicas of the model; -1 is what the other axes leave.")] = -1
    dp_shard: Annotated[Degree, Meta(description="Ranks that one replica's state is split over.")] = 1
    cp: Annotated[Degree, Meta(description="Ranks that one sequence is split over.")] = 1
    cp_method: Annotated[
        Literal["gather", "alltoall"],
        Meta(
            description="How queries meet keys of other ranks under cp. gather: keys and values of the whole sequence come "
            "to every rank; takes any number of heads. alltoall: each rank gets all positions of some of the heads."
        ),
    ] = "gather"
    tp: Annotated[Degree, Meta(description="Ranks that each matrix is split over.")] = 1
    pp: Annotated[Degree, Meta(description="Ranks that the blocks are split over.")] = 1
    pp_schedule: Annotated[
        Literal["gpipe", "1f1b", "interleaved-1f1b", "zero-bubble", "zbv"] | None,
        Meta(description="Order of the passes under pp; docs/math/pipeline.md compares them. auto: 1f1b.", extra=AUTO),
    ] = None
    pp_stages_per_rank: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Stages that each rank of pp holds. auto: 2 for interleaved-1f1b and zbv, which need several, or 1.",
            extra=AUTO,
        ),
    ] = None
    pp_layers: Annotated[
        tuple[Annotated[int, Meta(ge=1)], ...] | None,
        Meta(
            description="Blocks of each stage, such as [3, 3, 2]. auto: balanced by cost, the head counted.", extra=AUTO
        ),
    ] = None
    sequence_parallel: Annotated[
        bool | None,
        Meta(
            description="Under tp, a rank holds a slice of the positions between products instead of all of them: less "
            "memory for equal traffic. auto: where the sequence divides.",
            extra=AUTO,
        ),
    ] = None
    zero_stage: Annotated[
        Literal[1, 2, 3] | None,
        Meta(
            description="What dp_shard splits for the whole step. 1: moments; 2: also gradients; 3: also weights, which "
            "are gathered again for the backward pass. auto: 3 where dp_shard is over 1; under pp it is 1.",
            extra=AUTO,
        ),
    ] = None
    reduce_every: Annotated[
        Literal["auto", "step", "microbatch"],
        Meta(
            description="Gradients are reduced once a step, and kept whole between micro-batches, or after every "
            "micro-batch, and kept split. auto: microbatch for zero_stage 2 and 3, step otherwise."
        ),
    ] = "auto"
    precision: Annotated[
        Literal["auto", "fp32", "bf16", "fp16", "fp64", "fp8"],
        Meta(
            description="Arithmetic of forward and backward; weights and moments stay fp32 under bf16 and fp16 (which has "
            "a dynamic loss scale). auto: bf16 where the device multiplies it faster and the model is wide enough to gain. "
            "fp8 is refused, with the reason (docs/guide/platforms.md)."
        ),
    ] = "auto"
    parameter_dtype: Annotated[
        Literal["fp32", "bf16"],
        Meta(
            description="Element type of the weights in forward and backward. bf16: an fp32 master copy is updated in "
            "their place, gradients are summed in fp32. fp64 arithmetic has fp64 weights."
        ),
    ] = "fp32"
    reduce_dtype: Annotated[
        Literal["auto", "fp32", "bf16"],
        Meta(description="Element type of the gradient reduction. auto: that of the gradients."),
    ] = "auto"
    bucket_bytes: Annotated[
        Bytes | None, Meta(description="Gradients are reduced in buckets of about this size.", extra=AUTO)
    ] = None
    overlap: Annotated[
        bool | None,
        Meta(description="Reduce a bucket while the backward pass goes on, or all of them after it.", extra=AUTO),
    ] = None
    compile: Annotated[
        bool | None,
        Meta(
            description="torch.compile of each block. auto: where a C++ compiler is there (or a GPU) and the run is long "
            "enough to repay the compilation.",
            extra=AUTO,
        ),
    ] = None
    cuda_graphs: Annotated[
        bool,
        Meta(
            description="Replay a step's kernels as a graph. true is refused, with the reason (docs/guide/platforms.md)."
        ),
    ] = False
    recompute: Annotated[
        Literal["none", "selective", "full"],
        Meta(
            description="What the backward pass computes anew instead of keeping, per block. selective: all but the "
            "outputs of matrix products and attention. full: everything but the block's input."
        ),
    ] = "none"
    offload: Annotated[
        Literal["none", "host", "disk"],
        Meta(
            description="Where AdamW's moments are kept: with the weights, in host memory (ranks on accelerators), or in "
            "a memory-mapped file of each rank."
        ),
    ] = "none"
    offload_dir: Annotated[
        str | None,
        Meta(description="Folder of the files of offload = disk. auto: the run directory.", extra=AUTO),
    ] = None
    loss_chunk_tokens: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description="Output head and loss are taken over so many tokens at a time, so that the logits of a "
            "micro-batch never stand whole; 0: whole. auto: chunks where the logits would be large.",
            extra=AUTO,
        ),
    ] = None


class BatchSection(Section, frozen=True):
    """The global batch is the fixed quantity; micro-batch and accumulation follow from it."""

    global_batch: Annotated[Count, Meta(description="Sequences (samples) per optimizer step, over all ranks.")] = Count(
        24
    )
    microbatch: Annotated[
        Count | None,
        Meta(description="Sequences per rank and forward pass. auto: the largest that fits.", extra=AUTO),
    ] = None

    def __post_init__(self) -> None:
        if self.global_batch < 1:
            raise ValueError(f"global_batch = {self.global_batch} must be at least 1")
        if self.microbatch is not None and self.microbatch < 1:
            raise ValueError(f"microbatch = {self.microbatch} must be at least 1")

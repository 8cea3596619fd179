"""From a job and a number of ranks to numbers: layout, batch, precision, length, memory, each with its formula."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from paceline.cluster.probe import Host, probe_host
from paceline.errors import JobError
from paceline.job.checks import check_compiler, check_reduction
from paceline.job.load import DEFAULT_STEPS, Job
from paceline.model.flop import training_flop_per_token
from paceline.model.spec import ModelSpec
from paceline.model.spec import resolve as resolve_model
from paceline.optim.schedule import describe
from paceline.parallel.batch import BatchPlan, plan_batch
from paceline.parallel.context.config import ContextConfig, context_config
from paceline.parallel.ddp.config import DdpConfig, ddp_config
from paceline.parallel.fsdp.config import FsdpConfig, fsdp_config
from paceline.parallel.layout import Layout, resolve_layout
from paceline.parallel.memory import (
    RankMemory,
    heaviest,
    layout_cost,
    parameter_sizes,
    stage_memories,
    weight_bytes,
    work_of,
)
from paceline.parallel.pipeline.balance import layer_costs
from paceline.parallel.pipeline.config import PipelineConfig
from paceline.parallel.pipeline.cost import describe_pipeline, own_parameters
from paceline.parallel.pipeline.rules import (
    check_microbatches,
    check_sharding,
    check_transforms,
    config_takes,
    pipeline_config,
)
from paceline.parallel.registry import strategies
from paceline.parallel.strategy import Cost
from paceline.parallel.tensor.config import TensorConfig, tensor_config
from paceline.parallel.transforms import (
    Transforms,
    check_loss_chunk,
    describe_chunks,
    describe_offload,
    describe_order,
    describe_recompute,
    loss_chunk_tokens,
    resolve_transforms,
)
from paceline.units import format_bytes, format_count, format_seconds

MICROBATCH_TOKENS = {"cpu": 2048, "cuda": 16384}
"""Tokens per forward pass beyond which a larger micro-batch no longer raises the rate (docs/log.md)."""

MICROBATCHES_PER_STAGE = 4
"""Micro-batches per rank of a pipeline that a derived micro-batch leaves, where the global batch has them: with so many the
bubble of 1f1b is below a fifth of the step."""

MEMORY_SHARE = 0.9
"""Share of a device's memory that a derived micro-batch may fill."""

NOMINAL_FLOP_PER_SECOND = {"cpu": 1e11, "cuda": 2e14}
"""Rate per rank assumed before anything is measured, only to judge whether a run repays its compilation."""

COMPILE_SECONDS = {"cpu": 30.0, "cuda": 60.0}
COMPILE_GAIN = {"cpu": 0.1, "cuda": 0.2}
"""What compiling the blocks of a decoder costs once, and the share of a step that it saves (docs/log.md)."""

BF16_MIN_DIM = 64
"""Width from which bf16 products gain more than their conversions cost on a CPU (docs/log.md)."""


class Derivation(msgspec.Struct, frozen=True):
    """A derived value with the formula that gave it."""

    key: str
    value: str
    formula: str

    def __str__(self) -> str:
        return f"{self.key} = {self.value}   ({self.formula})"


class Resolved(msgspec.Struct, frozen=True):
    """A job as it runs on `world_size` ranks. `steps` is None until the data of a run in epochs is known."""

    job: Job
    host: Host
    spec: ModelSpec
    layout: Layout
    batch: BatchPlan
    ddp: DdpConfig
    fsdp: FsdpConfig
    tensor: TensorConfig
    context: ContextConfig
    pipeline: PipelineConfig
    precision: str
    compile: bool
    transforms: Transforms
    steps: int | None
    stages: tuple[RankMemory, ...]
    memory_available_bytes: int
    derivations: tuple[Derivation, ...]

    @property
    def heaviest(self) -> int:
        """The rank of a pipeline that needs most memory; 0 where there is no pipeline."""
        return heaviest(self.stages)

    @property
    def memory(self) -> RankMemory:
        """Of a rank, the one that needs most."""
        return self.stages[self.heaviest]

    @property
    def tokens_per_step(self) -> int:
        return self.batch.global_batch * self.job.data.sequence_length

    @property
    def fits(self) -> bool:
        return self.memory.total_bytes <= self.memory_available_bytes


def resolve_here(job: Job) -> Resolved:
    """The job on this host, and others like it, with the number of processes that it asks for on each."""
    host = probe_host()
    procs = procs_here(job, host)
    return resolve_job(job, int(job.launch.nodes or 1) * procs, host, ranks_per_host=procs)


def procs_here(job: Job, host: Host) -> int:
    """Ranks on one host."""
    return int(job.launch.procs_per_node or host.default_procs)


def resolve_job(
    job: Job,
    world_size: int,
    host: Host,
    train_samples: int | None = None,
    *,
    ranks_per_host: int | None = None,
    derive: bool = True,
) -> Resolved:
    """Resolve every derived value.

    Args:
        job: the parsed job.
        world_size: ranks over all nodes.
        host: the machine under each rank.
        train_samples: samples of one epoch, where known.
        ranks_per_host: ranks that share a host's memory where they run on its processor; all of them unless given.
        derive: whether to say where each value comes from; a search asks for thousands and shows one.

    Raises:
        JobError: the job contradicts itself or the number of ranks.
    """
    spec = resolve_model(job.model)
    _check_sequence(job, spec)
    layout = resolve_layout(job.parallel, world_size, job.is_set)
    strategies(layout)
    precision, why_precision = _precision(job, spec, host)
    ddp, fsdp = ddp_config(job.parallel), fsdp_config(job.parallel, precision, pipelined=layout.pp > 1)
    tensor = tensor_config(job.parallel, spec, layout, job.data.sequence_length, job.is_set)
    context = context_config(job.parallel, spec, layout, job.data.sequence_length, job.is_set)
    pipeline = pipeline_config(job.parallel, layout, layer_costs(spec, job.data.sequence_length), job.is_set)
    check_sharding(job.parallel, layout, job.is_set)
    available = _memory_per_rank(host, ranks_per_host or world_size)
    fixed = resolve_transforms(job.parallel, layout, host, precision, job.run_path)

    def transforms_of(batch: BatchPlan) -> Transforms:
        tokens = batch.microbatch * job.data.sequence_length // layout.cp
        return msgspec.structs.replace(
            fixed, loss_chunk_tokens=loss_chunk_tokens(job.parallel, spec, tokens, host.device_kind)
        )

    def memory_of(batch: BatchPlan) -> list[RankMemory]:
        return stage_memories(
            spec, layout, batch, job.optimizer, ddp, fsdp, transforms=transforms_of(batch),
            sequence_length=job.data.sequence_length, precision=precision, device_kind=host.device_kind, tensor=tensor,
            context=context, pipeline=pipeline,
        )  # fmt: skip

    def largest(per_rank: int) -> tuple[int, str]:
        return _largest_microbatch(job, host, layout, per_rank, memory_of, available)

    batch = plan_batch(job.batch, layout, largest, lambda accumulation: config_takes(pipeline, accumulation))
    check_microbatches(pipeline, batch.accumulation, batch.per_rank)
    check_reduction(job.parallel, layout, batch, job.is_set)
    steps, why_steps = _steps(job, batch, train_samples)
    compiled, why_compile = decide_compile(job, spec, host, layout, batch, steps, pipeline)
    check_transforms(pipeline, compiled, job.parallel.parameter_dtype, job.parallel.recompute)
    transforms, tokens = transforms_of(batch), batch.microbatch * job.data.sequence_length // layout.cp
    check_loss_chunk(job.parallel, tokens)
    found = Resolved(
        job=job, host=host, spec=spec, layout=layout, batch=batch, ddp=ddp, fsdp=fsdp, tensor=tensor, context=context,
        pipeline=pipeline, precision=precision, compile=compiled,
        transforms=transforms, steps=steps, stages=tuple(memory_of(batch)), memory_available_bytes=available,
        derivations=(),
    )  # fmt: skip
    if not derive:
        return found
    return msgspec.structs.replace(found, derivations=_derivations(found, why_precision, why_steps, why_compile))


def _derivations(found: Resolved, why_precision: str, why_steps: str, why_compile: str) -> tuple[Derivation, ...]:
    """Where each derived value comes from; the reasons that are given are those that cannot be told from the values."""
    job, spec, layout, batch = found.job, found.spec, found.layout, found.batch
    transforms, tokens = found.transforms, batch.microbatch * job.data.sequence_length // layout.cp
    staged = layout.pp > 1
    return (
        Derivation("parallel", str(layout), f"{layout.world_size} ranks"),
        Derivation("batch.microbatch", str(batch.microbatch), batch.reason),
        Derivation(
            "accumulation", str(batch.accumulation),
            f"global_batch {batch.global_batch} / ({batch.dp} data ranks x microbatch {batch.microbatch})",
        ),
        Derivation("run.steps", str(found.steps) if found.steps is not None else "known with the data", why_steps),
        Derivation("optimizer.lr", *_split(describe(job.optimizer, batch.global_batch))),
        Derivation("parallel.precision", found.precision, why_precision),
        Derivation("parallel.compile", str(found.compile).lower(), why_compile),
        Derivation("parallel.recompute", transforms.recompute,
                   describe_recompute(transforms.recompute, spec, job.data.sequence_length)),
        Derivation("parallel.loss_chunk_tokens", str(transforms.loss_chunk_tokens),
                   describe_chunks(transforms.loss_chunk_tokens, tokens, spec.vocab_size)),
        Derivation("parallel.offload", transforms.offload.place, describe_offload(transforms.offload)),
        Derivation("transforms", *describe_order(transforms, found.compile, strategies(layout))),
        *([Derivation("parallel.pp_layers", *describe_pipeline(found.pipeline, batch.accumulation))] if staged else []),
    )  # fmt: skip


def with_samples(resolved: Resolved, train_samples: int) -> Resolved:
    """The same resolution once the number of samples is known: epochs become steps."""
    if resolved.steps is not None:
        return resolved
    again = resolve_job(resolved.job, resolved.layout.world_size, resolved.host, train_samples)
    # The decision to compile was taken, and its reason printed, before the length was known.
    kept = {d.key: d for d in resolved.derivations if d.key in ("parallel.compile", "transforms")}
    return msgspec.structs.replace(
        again,
        compile=resolved.compile,
        memory_available_bytes=resolved.memory_available_bytes,
        derivations=tuple(kept.get(d.key, d) for d in again.derivations),
    )


def resolved_cost(resolved: Resolved, rank: int = 0) -> Cost:
    """What a rank keeps and sends in an optimizer step."""
    sizes = parameter_sizes(
        resolved.spec, weight_bytes(resolved.precision), resolved.layout.tp, resolved.layout.coordinates(rank)["tp"]
    )
    length, pipeline, layout = resolved.job.data.sequence_length, resolved.pipeline, resolved.layout
    if layout.pp > 1:
        sizes = own_parameters(sizes, pipeline, layout.coordinates(rank)["pp"], resolved.spec.tie_embeddings)
    return layout_cost(
        sizes, resolved.layout, resolved.job.optimizer, resolved.ddp, resolved.fsdp, resolved.batch.accumulation, rank,
        tensor=resolved.tensor, context=resolved.context, pipeline=pipeline,
        work=work_of(resolved.spec, resolved.batch, length, resolved.precision, resolved.transforms),
    )  # fmt: skip


def _check_sequence(job: Job, spec: ModelSpec) -> None:
    length = job.data.sequence_length
    if length > spec.max_sequence_length:
        raise JobError(
            f"{length} tokens are more than the {spec.max_sequence_length} that the model is made for",
            key="data.sequence_length",
            values={"sequence_length": length, "max_sequence_length": spec.max_sequence_length},
            hint=f"Set data.sequence_length={spec.max_sequence_length}, or model.max_sequence_length={length}.",
        )


def _memory_per_rank(host: Host, ranks_per_host: int) -> int:
    return host.memory_bytes // ranks_per_host if host.device_kind == "cpu" else host.device_memory_bytes


def _precision(job: Job, spec: ModelSpec, host: Host) -> tuple[str, str]:
    asked = job.parallel.precision
    if asked != "auto":
        return asked, "set"
    if not host.fast_bf16:
        return "fp32", f"auto: {host.device_name} has no bf16 products of its own"
    if host.device_kind == "cpu" and spec.dim < BF16_MIN_DIM:
        return "fp32", f"auto: dim {spec.dim} is below {BF16_MIN_DIM}, where bf16 gains nothing on a CPU"
    return "bf16", "auto: the device multiplies bf16 faster; weights, moments and sums stay fp32"


def _largest_microbatch(
    job: Job,
    host: Host,
    layout: Layout,
    per_rank: int,
    memory_of: Callable[[BatchPlan], list[RankMemory]],
    available: int,
) -> tuple[int, str]:
    sequence = job.data.sequence_length // layout.cp
    target = max(1, MICROBATCH_TOKENS[host.device_kind] // sequence)
    wanted = min(per_rank, target)
    if layout.pp > 1:
        wanted = min(wanted, max(1, per_rank // (MICROBATCHES_PER_STAGE * layout.pp)))
    while wanted > 1:
        accumulation = 1 if layout.pp == 1 else per_rank // wanted
        stages = memory_of(BatchPlan(int(job.batch.global_batch), layout.dp, wanted, accumulation, "trial"))
        if max(memory.total_bytes for memory in stages) <= MEMORY_SHARE * available:
            break
        wanted -= 1
    limit = MICROBATCH_TOKENS[host.device_kind]
    filled = (
        f", for at least {MICROBATCHES_PER_STAGE} micro-batches per rank of pp where that goes,"
        if layout.pp > 1
        else ""
    )
    return wanted, (
        f"auto: largest divisor of {per_rank} sequences per rank with at most {limit} tokens{filled} "
        f"that fits in {MEMORY_SHARE:.0%} of {format_bytes(available)}"
    )


def _steps(job: Job, batch: BatchPlan, train_samples: int | None) -> tuple[int | None, str]:
    run = job.run
    if run.tokens is not None:
        per_step = batch.global_batch * job.data.sequence_length
        return math.ceil(
            run.tokens / per_step
        ), f"{format_count(run.tokens)} tokens / {per_step} tokens per step, rounded up"
    if run.epochs is not None:
        if train_samples is None:
            return None, f"{run.epochs:g} epochs of the prepared samples / global_batch {batch.global_batch}"
        steps = math.ceil(run.epochs * train_samples / batch.global_batch)
        return steps, f"{run.epochs:g} epochs x {train_samples} samples / global_batch {batch.global_batch}, rounded up"
    if run.steps is not None:
        return int(run.steps), "set"
    return DEFAULT_STEPS, "no length given"


def decide_compile(
    job: Job,
    spec: ModelSpec,
    host: Host,
    layout: Layout,
    batch: BatchPlan,
    steps: int | None,
    pipeline: PipelineConfig,
) -> tuple[bool, str]:
    check_compiler(job.parallel.compile, host)
    if job.parallel.compile is not None:
        return job.parallel.compile, "set"
    if pipeline.ranks > 1 and pipeline.splits_backward:
        return False, f"auto: {pipeline.schedule} runs the backward in two parts, and compiled blocks have it in one"
    if host.compiler is None:
        return False, "auto: no C++ compiler on the path; eager (with g++ a step would be faster)"
    if steps is None:
        return True, "auto: a run in epochs"
    kind = host.device_kind
    flop = (
        training_flop_per_token(spec, job.data.sequence_length) * batch.global_batch * job.data.sequence_length * steps
    )
    seconds = flop / layout.world_size / NOMINAL_FLOP_PER_SECOND[kind]
    saved = seconds * COMPILE_GAIN[kind]
    worth = saved > COMPILE_SECONDS[kind]
    return worth, (
        f"auto: about {format_seconds(seconds)} of arithmetic x {COMPILE_GAIN[kind]:.0%} saved "
        f"{'repays' if worth else 'does not repay'} {COMPILE_SECONDS[kind]:.0f} s of compilation"
    )


def _split(described: str) -> tuple[str, str]:
    value, _, formula = described.partition(" ")
    return value, formula.strip("= ()")

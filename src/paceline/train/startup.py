"""From a resolved job and its data to a session: model, strategies, optimizer and batches, in a fixed order.

The model is made on the meta device; its blocks are made to recompute and compiled, in the order that
`parallel.transforms` states, and strategies come last. They take the initial weights, which are made from (seed, name),
whole and one at a time on every rank, so that nothing is sent and every layout starts from the same ones.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from paceline.cluster.measure import matmul_peak
from paceline.data.dataset import TokenDataset
from paceline.data.evaluation import eval_batches
from paceline.data.loader import Loader
from paceline.data.prepare import PreparedData
from paceline.errors import DataError
from paceline.job.resolve import Resolved
from paceline.model.flop import training_flop_per_token
from paceline.model.init import initial_weights
from paceline.model.transformer import Decoder
from paceline.optim.config import OptimizerSection
from paceline.optim.optimizer import build_optimizer
from paceline.optim.schedule import learning_rate
from paceline.parallel.apply import Applied, apply_strategies
from paceline.parallel.collectives import gather_objects
from paceline.parallel.compile.apply import compile_blocks
from paceline.parallel.context.apply import batch_part, split_attention
from paceline.parallel.mesh import Mesh, build_mesh
from paceline.parallel.offload.apply import offloaded_adamw
from paceline.parallel.offload.config import OffloadConfig
from paceline.parallel.precision.apply import DTYPES, autocast_of, loss_scale_of
from paceline.parallel.recompute.apply import recompute_blocks
from paceline.parallel.split import ModelSplit
from paceline.parallel.tensor.apply import split_decoder, vocabulary_part
from paceline.train import random_state
from paceline.train.language import language_functions, relayed
from paceline.train.resume import Start, restore_random
from paceline.train.session import Session
from paceline.train.state import TrainingState
from paceline.train.step import Batch, TrainStep, on_device
from paceline.train.window import WindowFacts
from paceline.workers.rendezvous import World

Begin = Callable[[TrainingState], Start]
"""Fills a fresh state from a checkpoint, or leaves it; says where the attempt begins."""


def build_session(
    resolved: Resolved, data: PreparedData, world: World, begin: Begin = lambda state: Start()
) -> Session:
    """The session of a language-model job on this rank, begun where `begin` says: the loader starts after that.

    Raises:
        DataError: the tokenizer has more ids than the model has rows.
        PacelineError: what `begin` raised.
    """
    job, steps = resolved.job, resolved.steps
    if steps is None:
        raise ValueError("a run in epochs is resolved with its samples first")
    _check_vocabulary(resolved, data)
    device, group = world.device, world_group(world)
    mesh = build_mesh(resolved.layout, device)
    model, applied = build_model(resolved, mesh, device)
    transforms = resolved.transforms
    forward, loss = language_functions(
        resolved.spec,
        job.run.seed,
        chunk_tokens=transforms.loss_chunk_tokens,
        part=vocabulary_part(resolved.spec, mesh),
        split_backward=resolved.pipeline.splits_backward,
    )
    autocast = autocast_of(resolved.precision, device, transforms.parameter_dtype)
    optimizer = make_optimizer(job.optimizer, applied, transforms.offload)
    step = TrainStep(
        model, forward, loss, optimizer, applied.reducer,
        group=group, prescale=1.0 / resolved.tokens_per_step, clip_norm=job.optimizer.clip_norm,
        device=device, autocast=autocast, loss_scale=loss_scale_of(resolved.precision), master=applied.master,
        counts=resolved.layout.counts_loss(world.rank), stages=applied.stages,
    )  # fmt: skip
    state = TrainingState(model, applied, optimizer, step.loss_scale, rank=world.rank, device=device)
    start = begin(state)
    loader = Loader(
        data.train, global_batch=resolved.batch.global_batch, microbatch=resolved.batch.microbatch,
        dp_rank=resolved.layout.data_rank(world.rank), dp_degree=resolved.layout.dp, seed=job.run.seed, steps=steps,
        workers=job.data.workers, start_step=start.step,
    )  # fmt: skip
    if applied.stages is not None:
        forward, loss = relayed(applied.stages, forward, loss)
    return Session(
        model=model, step=step, forward=forward, loss=loss, batches=loader,
        evals={name: _eval_set(dataset, resolved, world, applied.in_step) for name, dataset in data.evals.items()},
        schedule=lambda at: learning_rate(job.optimizer, at, steps, resolved.batch.global_batch),
        steps=steps, tokens_per_step=resolved.tokens_per_step, samples_per_step=resolved.batch.global_batch,
        device=device, world_size=world.world_size, rank=world.rank, group=group, autocast=autocast,
        flop_per_token=training_flop_per_token(resolved.spec, job.data.sequence_length),
        peak_flop_per_second=measured_peak(resolved.precision, device, group),
        wait_for_all=host_barrier(world),
        batch_needs_step=resolved.spec.dropout > 0 or resolved.spec.attention_dropout > 0,
        state=state, start=start, restore_random=lambda: _set_random(start, state, job.run.seed),
        notes=loader.notes, settle=applied.settle, whole_weights=applied.whole_weights, in_step=applied.in_step,
        counts_samples=resolved.layout.counts_samples(world.rank), part_of=batch_part(resolved.layout, world.rank),
        window_facts=WindowFacts(device).since_last,
    )  # fmt: skip


def _set_random(start: Start, state: TrainingState, seed: int) -> None:
    """The generators that draw outside of the model: as they were at the save, or a function of the seed from the start."""
    if start.manifest is None:
        random_state.seed_anew(seed, start.step, state.rank, state.device)
    else:
        restore_random(start, state, seed)


def build_model(resolved: Resolved, mesh: Mesh, device: torch.device) -> tuple[nn.Module, Applied]:
    """The decoder with its initial weights on `device`, its blocks compiled where the job says so, under its strategies."""
    with torch.device("meta"):
        model = Decoder(resolved.spec)
    if resolved.precision == "fp64":
        model = model.double()
    initial = initial_weights(model, resolved.spec, resolved.job.run.seed)
    split = split_model(model, resolved, mesh)
    split_attention(model, mesh, resolved.context, compiled=resolved.compile)
    blocks = list(model.blocks.values())
    recompute_blocks(blocks, resolved.transforms.recompute)
    if resolved.compile:
        compile_blocks(blocks)
    applied = apply_strategies(
        model, blocks, mesh, ddp=resolved.ddp, fsdp=resolved.fsdp, device=device, initial=initial, split=split,
        bf16_weights=resolved.transforms.parameter_dtype == "bf16",
    )  # fmt: skip
    if resolved.layout.pp > 1:
        from paceline.parallel.pipeline.apply import Pipeline

        applied = replace(applied, stages=Pipeline(model, resolved.pipeline, mesh, device))
    return model, applied


def split_model(model: Decoder, resolved: Resolved, mesh: Mesh) -> ModelSplit | None:
    """Cut the decoder over the axes that the ranks of one model share, in place; None where there are none."""
    cuts = []
    if resolved.layout.pp > 1:
        # torch's pipelining loads its compiler's front end, which runs without it should not wait for.
        from paceline.parallel.pipeline.apply import cut

        cuts.append(cut(model, mesh, resolved.pipeline))
    if resolved.layout.tp > 1:
        cuts.append(split_decoder(model, resolved.spec, mesh, resolved.tensor))
    return functools.reduce(ModelSplit.followed_by, cuts) if cuts else None


def make_optimizer(section: OptimizerSection, applied: Applied, offload: OffloadConfig) -> torch.optim.Optimizer:
    """The optimizer over a model's parameters, its moments where `offload` wants them."""
    if offload.place == "none":
        return build_optimizer(section, applied.parameters)
    return offloaded_adamw(section, applied.parameters, offload)


def world_group(world: World) -> dist.ProcessGroup | None:
    """The group of all ranks; None for one."""
    return dist.group.WORLD if world.world_size > 1 else None


def measured_peak(precision: str, device: torch.device, group: dist.ProcessGroup | None) -> float:
    """Mean over the ranks of the matmul peak, measured by all of them at once as they share the host."""
    if group is not None:
        dist.barrier(group)
    return float(torch.tensor(gather_objects(matmul_peak(DTYPES[precision], device), group)).mean())


def _check_vocabulary(resolved: Resolved, data: PreparedData) -> None:
    rows, ids = resolved.spec.vocab_size, data.tokenizer.vocabulary
    if ids > rows:
        raise DataError(
            f"the tokenizer has {ids} ids and the model {rows} rows",
            key="model.vocab_size",
            values={"vocab_size": rows, "tokenizer": ids},
            hint=f"Set model.vocab_size={-(-ids // 64) * 64}, or choose the tokenizer that the model was made for.",
        )


def _eval_set(dataset: TokenDataset, resolved: Resolved, world: World, in_step: bool) -> Callable[[], Iterable[Batch]]:
    part_of = batch_part(resolved.layout, world.rank)

    def batches() -> Iterator[Batch]:
        for batch in eval_batches(
            dataset, microbatch=resolved.batch.microbatch, dp_rank=resolved.layout.data_rank(world.rank),
            dp_degree=resolved.layout.dp, limit=int(resolved.job.data.eval_sequences), in_step=in_step,
        ):  # fmt: skip
            yield on_device(part_of(batch), world.device)

    return batches


def host_barrier(world: World) -> Callable[[], None]:
    """A barrier on the host that may be called again and again."""
    count = itertools.count()
    return lambda: world.host_barrier(f"phase-{next(count)}")

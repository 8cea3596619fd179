"""The Python face of the product: any module, trained with the same step, run directory, records and report.

    import paceline

    def loss(output, batch):                     # (sum over samples or tokens, weight)
        return F.cross_entropy(output, batch["label"], reduction="sum"), torch.tensor(float(len(output)))

    trainer = paceline.Trainer(model, loss, data=dataset, global_batch=256)
    trainer.fit(steps=1000)                      # or: for metrics in trainer.steps(1000): ...

`python script.py` runs it on one process, torchrun on several: the script does not change.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline import __version__
from paceline.checkpoint.config import CheckpointSection
from paceline.checkpoint.manifest import Manifest
from paceline.cluster.probe import probe_host
from paceline.config import COMMAND_LINE, Section, Setting, build
from paceline.data.evaluation import eval_batches
from paceline.data.loader import IterableLoader, Loader
from paceline.errors import JobError
from paceline.job.checks import check_compiler, check_effects, check_reduction
from paceline.optim.config import OptimizerSection
from paceline.optim.schedule import learning_rate
from paceline.parallel.apply import apply_strategies
from paceline.parallel.batch import BatchPlan, plan_batch
from paceline.parallel.collectives import gather_objects
from paceline.parallel.compile.apply import compile_blocks, tell_of_compilers
from paceline.parallel.config import BatchSection, ParallelSection
from paceline.parallel.ddp.config import ddp_config
from paceline.parallel.fsdp.config import fsdp_config
from paceline.parallel.layout import MODEL_AXES, Layout, resolve_layout
from paceline.parallel.mesh import build_mesh
from paceline.parallel.precision.apply import autocast_of, loss_scale_of
from paceline.parallel.recompute.apply import recompute_blocks
from paceline.parallel.registry import strategies
from paceline.parallel.transforms import Transforms, resolve_transforms
from paceline.run.directory import RunDirectory
from paceline.run.records import RunFinished, RunStarted, Step
from paceline.telemetry.config import TelemetrySection
from paceline.train import loop
from paceline.train.begin_and_end import end_early
from paceline.train.keep import Keeper
from paceline.train.keeping import make_keeper, make_room, tell_start
from paceline.train.observe import RunObserver
from paceline.train.own_module import (
    refuse_keys_of_model_axes,
    refuse_loader_worker,
    refuse_model_axes,
    require_doubles,
    same_weights,
    user_functions,
)
from paceline.train.resume import Start, restore_random, resume
from paceline.train.session import Session
from paceline.train.shared_run import open_directory, write_at_once
from paceline.train.startup import host_barrier, make_optimizer, world_group
from paceline.train.state import TrainingState
from paceline.train.step import Batch, Forward, TrainStep, on_device
from paceline.train.window import WindowFacts
from paceline.workers import stop
from paceline.workers.config import RecoverySection
from paceline.workers.rendezvous import World, join

COLLECTIVE_SECONDS = 600.0
GRACE_SECONDS = float(RecoverySection().grace)
SECTIONS: dict[str, type[Section]] = {
    "optimizer": OptimizerSection,
    "parallel": ParallelSection,
    "batch": BatchSection,
    "checkpoint": CheckpointSection,
}


class Trainer:
    """Trains `model` on `data` over however many ranks the script was started with.

    Args:
        model: any module. Its weights on rank 0 are the initial ones of all ranks.
        loss: `loss(output, batch)` returns (sum, weight); a first parameter called `model` is given the module instead of
            its output.
        data: map-style and picklable; items are dicts of arrays, tensors or numbers. Or an iterable of such items, each
            rank its own: the run ends for all ranks when one of them has no further step. A resumed run needs the same
            number of ranks then. With `state_dict` and `load_state_dict` it goes on where it was; without, what was read
            before is read again and left aside.
        global_batch: samples per optimizer step over all ranks.
        forward: `forward(model, batch)`; by default the module called on `batch["inputs"]`.
        optimizer: keys of `[optimizer]`, such as `{"name": "sgd", "lr": 0.1}`.
        layout: "auto", or keys of `[parallel]`, such as `{"precision": "bf16"}`.
        checkpoint: keys of `[checkpoint]`, such as `{"every": 100}`. A run directory that holds checkpoints is resumed.
        microbatch: samples per rank and forward; all of them unless given.
        evals: eval sets by name, map-style.
        blocks: the repeated parts of the model, each sharded as a unit of its own under `dp_shard`; by default the members
            of its ModuleLists and ModuleDicts. Every rank must run all of them in every forward pass.
        run: the run directory.
        seed: of the data order.
        workers: loader processes per rank.
        log_every, eval_every: steps between log lines and between evaluations (0: at the end only).

    Raises:
        JobError: the numbers do not divide, a key is unknown, or the run directory belongs to another job.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., tuple[Tensor, Tensor]],
        *,
        data: Any,
        global_batch: int,
        forward: Forward | None = None,
        optimizer: Mapping[str, Any] | None = None,
        layout: Literal["auto"] | Mapping[str, Any] = "auto",
        checkpoint: Mapping[str, Any] | None = None,
        microbatch: int | None = None,
        evals: Mapping[str, Any] | None = None,
        blocks: Sequence[nn.Module] | None = None,
        run: str | Path = "runs/trainer",
        seed: int = 0,
        workers: int = 1,
        log_every: int = 10,
        eval_every: int = 0,
    ) -> None:
        refuse_loader_worker()
        parallel = {} if layout == "auto" else dict(layout)
        batch = {"global_batch": global_batch} | ({} if microbatch is None else {"microbatch": microbatch})
        tables = {
            "optimizer": dict(optimizer or {}), "parallel": parallel, "batch": batch, "checkpoint": dict(checkpoint or {}),
        }  # fmt: skip
        self._values = {f"{section}.{key}": value for section, table in tables.items() for key, value in table.items()}
        settings = {key: Setting(value, COMMAND_LINE) for key, value in self._values.items()}
        sections = build(SECTIONS, settings)
        held = [
            (f"{name}.{key}", getattr(table, key))
            for name, table in sections.items()
            for key in table.__struct_fields__
        ]
        check_effects([*held, ("data.eval_fraction", 0.0), ("data.eval", tuple(evals or ()))], settings.__contains__)
        self._optimizer: OptimizerSection = sections["optimizer"]  # type: ignore[assignment]
        self._parallel: ParallelSection = sections["parallel"]  # type: ignore[assignment]
        # Before the ranks meet, as far as it is known by then.
        refuse_model_axes({axis: getattr(self._parallel, axis) for axis in MODEL_AXES})
        refuse_keys_of_model_axes(parallel)
        self._batch_section: BatchSection = sections["batch"]  # type: ignore[assignment]
        self._checkpoint: CheckpointSection = sections["checkpoint"]  # type: ignore[assignment]
        self._settings = settings
        self.model = model
        self._given_blocks = blocks
        self._forward, self._loss = user_functions(forward, loss)
        self._data, self._evals = data, dict(evals or {})
        self._run, self._seed, self._workers = Path(run), seed, workers
        self._policy = loop.Policy(
            log_every,
            eval_every,
            stop_on_bad_step=self._optimizer.bad_step == "stop",
            max_bad_steps=int(self._optimizer.max_bad_steps),
        )

    def fit(self, steps: int) -> dict[str, Any]:
        """Train for `steps` optimizer steps; returns `steps`, `loss`, `grad_norm`, `evals`, `samples_per_second`.

        Raises:
            Preempted: Ctrl-C, SIGTERM, SIGUSR1 or SIGUSR2 came to any rank, or `paceline stop`; the state is saved.
        """
        for _ in self.steps(steps):
            pass
        return self._summary

    def steps(self, steps: int) -> Iterator[Step]:
        """Train for `steps` optimizer steps, yielding the record of each.

        Leaving early ends the attempt there, without a save: the next one goes on from the last checkpoint.

        Raises:
            Preempted: as `fit`.
        """
        world = join_once()
        directory = self._open(world, steps)
        if directory.finished is not None:
            self._summary = _summary_of(directory.finished)
            return
        session, plan, layout = self._start(world, steps, directory)
        observer = RunObserver(
            directory, world.rank, steps=steps, start_step=session.start_step, log_every=self._policy.log_every,
            telemetry=TelemetrySection(),
        )  # fmt: skip
        outcome = loop.Outcome(steps=session.start_step)
        with (
            directory, observer, stop.noted(),
            closing(self._keeper(session, world, directory, plan, layout, observer)) as keeper,
        ):  # fmt: skip
            session.keeper = keeper
            try:
                if session.is_writer:
                    observer.write(self._started(session, directory, plan, layout))
                    tell_start(session, observer)
                yield from loop.iterate(session, self._policy, observer, outcome)
                if outcome.stopped:
                    raise end_early(session, keeper, observer, outcome, GRACE_SECONDS)
                if isinstance(session.batches, IterableLoader) and (ended := session.batches.report()):
                    observer.say(ended)
                keeper.finish(outcome.steps, outcome.evals)
                if session.is_writer:
                    observer.write(_finished(session, outcome))
            finally:
                session.batches.close()
                session.step.reducer.close()
        self._summary = {
            "steps": outcome.steps,
            "loss": outcome.loss,
            "grad_norm": outcome.grad_norm,
            "evals": dict(outcome.evals),
            "samples_per_second": outcome.tokens_per_second,
        }

    def _open(self, world: World, steps: int) -> RunDirectory:
        values = {**self._values, "run.steps": steps, "run.seed": self._seed, "parallel.ranks": world.world_size}
        return open_directory(self._run, values, world)

    def _start(self, world: World, steps: int, directory: RunDirectory) -> tuple[Session, BatchPlan, Layout]:
        layout = resolve_layout(self._parallel, world.world_size, lambda key: key in self._settings)
        strategies(layout)
        refuse_model_axes(layout.degrees())
        plan = plan_batch(self._batch_section, layout, lambda per_rank: (per_rank, "all samples of a rank"))
        check_reduction(self._parallel, layout, plan, lambda key: key in self._settings)
        device, group = world.device, world_group(world)
        same_weights(self.model.to(device), group)
        precision = self._precision
        if precision == "fp64":
            require_doubles(self.model)
        check_compiler(self._parallel.compile, probe_host())
        transforms = self._transforms(layout, precision)
        autocast = autocast_of(precision, device)
        recompute_blocks(
            self._blocks() if transforms.recompute != "none" else [], transforms.recompute, preserve_random_state=True
        )
        if self._parallel.compile:
            compile_blocks(self._blocks() or [self.model])
        else:
            # The module may have been compiled by its owner.
            tell_of_compilers()
        # A user's module is gathered in its own type: only autocast knows which of its operations bear 16 bit.
        applied = apply_strategies(
            self.model, self._blocks(), build_mesh(layout, device), ddp=ddp_config(self._parallel),
            fsdp=fsdp_config(self._parallel, "fp32"), device=device,
            bf16_weights=transforms.parameter_dtype == "bf16",
        )  # fmt: skip
        optimizer = make_optimizer(self._optimizer, applied, transforms.offload)
        step = TrainStep(
            self.model, self._forward, self._loss, optimizer, applied.reducer,
            group=group, prescale=1.0 / plan.global_batch, clip_norm=self._optimizer.clip_norm,
            device=device, autocast=autocast, loss_scale=loss_scale_of(precision), master=applied.master,
            counts=layout.counts_loss(world.rank),
        )  # fmt: skip
        state = TrainingState(self.model, applied, optimizer, step.loss_scale, rank=world.rank, device=device)
        place = self._checkpoint.place(directory.path)
        start = resume(
            state, world, group, self._checkpoint, place,
            prepare=lambda: make_room(self._checkpoint, place, state, world.world_size),
            check=lambda manifest: self._check_stream(manifest, world),
            record=lambda record: write_at_once(directory, record),
        )  # fmt: skip
        loader = self._loader(world, plan, layout, steps, start)
        if isinstance(loader, IterableLoader):
            state.position = loader.position
            loader.position()
        session = Session(
            model=self.model, step=step, forward=self._forward, loss=self._loss, batches=loader,
            evals={n: self._eval_set(d, plan, layout, world, applied.in_step) for n, d in self._evals.items()},
            schedule=lambda at: learning_rate(self._optimizer, at, steps, plan.global_batch),
            steps=steps, tokens_per_step=plan.global_batch, samples_per_step=plan.global_batch, device=device,
            world_size=world.world_size, rank=world.rank, group=group, autocast=autocast,
            wait_for_all=host_barrier(world), settle=applied.settle, whole_weights=applied.whole_weights,
            in_step=applied.in_step, counts_samples=layout.counts_samples(world.rank), state=state, start=start,
            restore_random=lambda: restore_random(start, state, self._seed), window_facts=WindowFacts(device).since_last,
        )  # fmt: skip
        return session, plan, layout

    def _keeper(
        self, session: Session, world: World, directory: RunDirectory, plan: BatchPlan, layout: Layout,
        observer: RunObserver,
    ) -> Keeper:  # fmt: skip
        what = {
            **layout.to_record(), "microbatch": plan.microbatch, "precision": self._precision,
            "compile": int(bool(self._parallel.compile)),
        }  # fmt: skip
        return make_keeper(
            session, world, directory, self._checkpoint, observer, about={"model": type(self.model).__name__},
            layout=what, precision=self._precision, best_of=next(iter(self._evals), None),
            grace=GRACE_SECONDS,
        )  # fmt: skip

    @property
    def _precision(self) -> str:
        return "fp32" if self._parallel.precision == "auto" else self._parallel.precision

    def _transforms(self, layout: Layout, precision: str) -> Transforms:
        if self._parallel.loss_chunk_tokens is not None:
            raise JobError(
                "has no effect on a loss of one's own, which is given the whole output",
                key="parallel.loss_chunk_tokens",
                hint="Remove it, or call paceline.loss.chunked.head_cross_entropy from forward.",
            )
        if self._parallel.recompute != "none" and not self._blocks():
            raise JobError(
                "has no effect on a model without blocks: none were given, and it has no list of modules",
                key="parallel.recompute",
                hint="Give paceline.Trainer the blocks that are to be computed anew.",
            )
        return resolve_transforms(self._parallel, layout, probe_host(), precision, self._run)

    def _loader(
        self, world: World, plan: BatchPlan, layout: Layout, steps: int, start: Start
    ) -> Loader | IterableLoader:
        group = world_group(world)
        if self._is_stream:
            ranks = start.manifest.ranks if start.manifest else []
            return IterableLoader(
                self._data, global_batch=plan.global_batch, microbatch=plan.microbatch, dp_rank=layout.data_rank(world.rank),
                dp_degree=layout.dp, steps=steps, agree=lambda has: gather_objects(has, group), start_step=start.step,
                position=ranks[world.rank].get("position") if ranks else None,
            )  # fmt: skip
        return Loader(
            self._data, global_batch=plan.global_batch, microbatch=plan.microbatch, dp_rank=layout.data_rank(world.rank),
            dp_degree=layout.dp, seed=self._seed, steps=steps, workers=self._workers, start_step=start.step,
        )  # fmt: skip

    @property
    def _is_stream(self) -> bool:
        return not hasattr(self._data, "__getitem__")

    def _check_stream(self, manifest: Manifest, world: World) -> None:
        """Each rank's stream is its own, so other ranks would read other samples."""
        if self._is_stream and manifest.ranks and manifest.world_size != world.world_size:
            raise JobError(
                f"data is a stream that each rank reads its own part of, and the checkpoint of step {manifest.step} was "
                f"saved by {manifest.world_size} ranks: {world.world_size} cannot go on where those were",
                key="data",
                values={"step": manifest.step, "saved_by": manifest.world_size, "ranks": world.world_size},
                hint=f"Resume with {manifest.world_size} ranks, or give Trainer a map-style dataset, which any number reads.",
            )

    def _blocks(self) -> list[nn.Module]:
        """The parts that are sharded one at a time: as given, else the members of the model's lists of modules."""
        if self._given_blocks is not None:
            return list(self._given_blocks)
        lists = [m for m in self.model.children() if isinstance(m, nn.ModuleList | nn.ModuleDict)]
        return [block for held in lists for block in held.children()]

    def _eval_set(
        self, dataset: Any, plan: BatchPlan, layout: Layout, world: World, in_step: bool
    ) -> Callable[[], Iterator[Batch]]:
        def batches() -> Iterator[Batch]:
            for batch in eval_batches(
                dataset, microbatch=plan.microbatch, dp_rank=layout.data_rank(world.rank), dp_degree=layout.dp,
                in_step=in_step,
            ):  # fmt: skip
                yield on_device(batch, world.device)

        return batches

    def _started(self, session: Session, directory: RunDirectory, plan: BatchPlan, layout: Layout) -> RunStarted:
        return RunStarted(
            step=session.start_step, samples=session.start_step * plan.global_batch,
            run_id=directory.run_id, job_digest=directory.job_digest, world_size=session.world_size,
            layout=dict(layout.degrees()), device=str(session.device), precision=self._precision,
            compile=bool(self._parallel.compile),
            microbatch=plan.microbatch, accumulation=plan.accumulation, global_batch=plan.global_batch,
            sequence_length=1, parameters=sum(p.numel() for p in self.model.parameters()), flop_per_token=0.0,
            flop_convention="none", versions={"paceline": __version__, "torch": str(torch.__version__)},
            launched=time.time(),
        )  # fmt: skip


_world: World | None = None


def join_once() -> World:
    """This process's place, joined at the first call: several trainers of a script share one process group."""
    global _world
    if _world is None:
        if dist.is_initialized():
            device = (
                torch.device("cpu")
                if not torch.cuda.is_available()
                else torch.device("cuda", torch.cuda.current_device())
            )
            raise JobError(
                f"a process group exists already ({dist.get_world_size()} ranks on {device})",
                hint="Let paceline.Trainer make the process group: remove init_process_group from the script.",
            )
        _world = join(COLLECTIVE_SECONDS)
    return _world


def _finished(session: Session, outcome: loop.Outcome) -> RunFinished:
    return RunFinished(
        step=outcome.steps, exit=0, reason="done", steps=outcome.steps, samples=outcome.steps * session.samples_per_step,
        loss=outcome.loss, eval_loss=next(iter(outcome.evals.values()), None), tokens=outcome.tokens,
        seconds=outcome.seconds, tokens_per_second=outcome.tokens_per_second,
    )  # fmt: skip


def _summary_of(finished: Mapping[str, Any]) -> dict[str, Any]:
    """What `fit` returns of a run that was done before."""
    return {
        "steps": finished["steps"],
        "loss": finished["loss"],
        "grad_norm": None,
        "evals": {} if finished["eval_loss"] is None else {"eval": finished["eval_loss"]},
        "samples_per_second": finished["tokens_per_second"],
    }

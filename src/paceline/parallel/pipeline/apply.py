"""Pipeline parallelism on torch's schedules: each rank keeps the blocks of its stages, and runs them in turn with the others.

The user's two functions run as they are on every stage: `forward` runs the model, which runs the passage of its blocks
that the stage stands for, with what came from the stage before in the place of the embedding; `loss` runs on the last one.
One call of a schedule is one optimizer step. Micro-batches are known to torch by their numbers alone, under which every
stage looks up inputs and labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import schedules

from paceline.checkpoint.boxes import Placement
from paceline.errors import DataError
from paceline.model.transformer import Decoder, Passage
from paceline.parallel.mesh import Mesh
from paceline.parallel.pipeline.config import AXIS, PipelineConfig
from paceline.parallel.pipeline.order import order
from paceline.parallel.pipeline.stage import Mark, Stage, Staged, StageModule
from paceline.parallel.split import ModelSplit, PartialGradients

Batch = dict[str, Any]

TIED = "embedding.weight"
"""The table that the first and the last stage hold alike where the model ties its output head to it."""

KEPT_SCHEDULES = 4
"""Schedules of other shapes or numbers of micro-batches that are kept for when they come again."""

SCHEDULES = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved-1f1b": schedules.ScheduleInterleaved1F1B,
    "zero-bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
}


def cut(model: Decoder, mesh: Mesh, config: PipelineConfig) -> ModelSplit:
    """Keep of a decoder what this rank's stages hold, in place. All ranks call this alike."""
    stages = config.stages_of(mesh_rank(mesh))
    first, last = 0 in stages, config.num_stages - 1 in stages
    blocks = [block for stage in stages for block in config.blocks_of(stage)]
    tied = model.spec.tie_embeddings
    model.keep(blocks, embedding=first, head=last)
    placements = {name: Placement.whole(parameter.shape) for name, parameter in model.named_parameters()}
    ends = _ends_group(mesh, config) if tied else None
    if ends is None:
        return ModelSplit(placements)
    return ModelSplit(placements, (PartialGradients(ends, (TIED,)),), {TIED: 2} if first or last else {})


def mesh_rank(mesh: Mesh) -> int:
    """This rank's place among the ranks of its pipeline."""
    return mesh.layout.coordinates(dist.get_rank())[AXIS]


class Pipeline:
    """Runs forward and backward passes of the stages of this rank.

    Args:
        model: what `cut` left, under its other strategies.
        config, mesh: those of the cut.
        device: where this rank computes.
    """

    def __init__(self, model: Staged, config: PipelineConfig, mesh: Mesh, device: torch.device) -> None:
        group = mesh.group(AXIS)
        if group is None:
            raise ValueError("a mesh without pp has no pipeline")
        self.model, self.config, self._device, self._group = model, config, device, group
        self._rank = mesh_rank(mesh)
        self._stages = config.stages_of(self._rank)
        self._dtype = next(model.parameters()).dtype
        self._kept: dict[tuple[Any, ...], Any] = {}
        self._window = _Window([], _nothing, _nothing, _unmarked)
        self._progress = _Progress(self._rank)

    def run(
        self,
        microbatches: Sequence[Batch],
        through: Callable[[Batch], Tensor],
        loss: Callable[[Batch], Tensor],
        mark: Mark,
    ) -> None:
        """Forward and backward passes of one optimizer step. Gradients of weights add up, as sums.

        Args:
            microbatches: those of this data rank, the same on all ranks of the pipeline.
            through: the user's forward of a micro-batch in a stage that is not the last.
            loss: the user's forward and loss in the last stage, to what the backward pass begins at.
            mark: called at the end of each part: `bubble` (waiting), `forward` and `backward`.

        Raises:
            DataError: the micro-batches differ in shape.
            RuntimeError: another rank has gone; names stage, micro-batch and direction of what this one waits for.
        """
        self._window = _Window(list(microbatches), through, loss, mark)
        schedule = self._schedule(len(microbatches), self._hidden(microbatches))
        numbers = torch.arange(len(microbatches))
        self._progress.begin(order(self.config, len(microbatches))[self._rank])
        try:
            schedule.step(microbatch=numbers, target=numbers, return_outputs=False)
        except RuntimeError as error:
            raise RuntimeError(f"{self._progress.waits_for(self.config)}: {error}") from error
        finally:
            self._window = _Window([], _nothing, _nothing, _unmarked)
            mark("bubble")

    def relay(self, batch: Batch, through: Callable[[Batch], Tensor], last: Callable[[Batch], Any]) -> Any:
        """A forward pass without a backward, of one batch; what `last` returns on the rank of the last stage, else None."""
        output: Any = None
        hidden = self._hidden([batch])
        for stage in self._stages:
            entering = None
            if stage > 0:
                before = self.config.rank_of(stage - 1)
                entering = output
                if before != self._rank:
                    entering = torch.empty_like(hidden, device=self._device)
                    dist.recv(entering, group=self._group, group_src=before)
            if stage == self.config.num_stages - 1:
                return self._pass(stage, entering, batch, last)
            output = self._pass(stage, entering, batch, through)
            after = self.config.rank_of(stage + 1)
            if after != self._rank:
                dist.send(output.contiguous(), group=self._group, group_dst=after)
        return None

    def logits_at(self, tokens_1L: Tensor, at: int) -> Tensor:
        """Logits_V of one position, on all ranks of the pipeline, which call this alike."""

        def run(batch: Batch) -> Tensor:
            output: Tensor = self.model(batch["tokens"])
            return output

        logits_BLV = self.relay({"tokens": tokens_1L}, run, run)
        told: list[Tensor | None] = [None if logits_BLV is None else logits_BLV[0, at].float().cpu()]
        last = self.config.rank_of(self.config.num_stages - 1)
        dist.broadcast_object_list(told, group=self._group, group_src=last, device=self._device)
        logits_V = told[0]
        assert logits_V is not None
        return logits_V

    def _pass(self, stage: int, entering: Tensor | None, batch: Batch, run: Callable[[Batch], Any]) -> Any:
        """Run a user's function while the model stands for one stage."""
        head = stage == self.config.num_stages - 1
        self.model.passage = Passage(self.config.blocks_of(stage), entering, head)
        try:
            return run(batch)
        finally:
            self.model.passage = None

    def _schedule(self, microbatches: int, hidden: Tensor) -> Any:
        """torch's schedule for a number of micro-batches of a shape: shapes are fixed in each of them."""
        key = (microbatches, hidden.shape, hidden.dtype)
        found = self._kept.pop(key, None)
        if found is None:
            stages = [
                Stage(
                    StageModule(self._runner(stage), lambda stage=stage: self._parameters(stage)),  # type: ignore[misc]
                    stage, self.config.num_stages, hidden, self._group, self._device, self._mark,
                )
                for stage in self._stages
            ]  # fmt: skip
            single = self.config.schedule in ("gpipe", "1f1b")
            found = SCHEDULES[self.config.schedule](
                stages[0] if single else stages, microbatches, loss_fn=_as_it_is, scale_grads=False
            )
        self._kept[key] = found
        while len(self._kept) > KEPT_SCHEDULES:
            self._kept.pop(next(iter(self._kept)))
        return found

    def _runner(self, stage: int) -> Callable[[int, Tensor | None], Tensor]:
        last = stage == self.config.num_stages - 1

        def run(number: int, entering: Tensor | None) -> Tensor:
            window = self._window
            output: Tensor = self._pass(
                stage, entering, window.batches[number], window.loss if last else window.through
            )
            return output

        return run

    def _parameters(self, stage: int) -> Iterator[nn.Parameter]:
        """Those of a stage. What stands outside of blocks is told apart by the stages at both ends, which use it."""
        for block in self.config.blocks_of(stage):
            yield from self.model.blocks[str(block)].parameters()
        if stage in (0, self.config.num_stages - 1):
            inside = {id(p) for p in self.model.blocks.parameters()}
            yield from (p for p in self.model.parameters() if id(p) not in inside)

    def _hidden(self, batches: Sequence[Batch]) -> Tensor:
        """The residual stream of each of these batches, on the meta device."""
        shapes = {self.model.residual_shape(batch["tokens"]) for batch in batches}
        if len(shapes) > 1:
            raise DataError(
                f"micro-batches of one step differ in shape: {sorted(shapes)}",
                key="parallel.pp",
                values={"shapes": sorted(shapes)},
                hint="Give all micro-batches of a step one shape, or set parallel.pp=1.",
            )
        return torch.empty(shapes.pop(), dtype=self._dtype, device="meta", requires_grad=True)

    def _mark(self, part: str) -> None:
        if part != "bubble":
            self._progress.passed()
        self._window.mark(part)


@dataclass(frozen=True)
class _Window:
    """The micro-batches of the step under way, by their numbers, and what runs them."""

    batches: list[Batch]
    through: Callable[[Batch], Tensor]
    loss: Callable[[Batch], Tensor]
    mark: Mark


class _Progress:
    """Where in its order of passes this rank is."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._actions: list[Any] = []
        self._done = 0

    def begin(self, actions: list[Any]) -> None:
        self._actions, self._done = actions, 0

    def passed(self) -> None:
        self._done += 1

    def waits_for(self, config: PipelineConfig) -> str:
        """The pass that comes next, and what it needs from whom."""
        if self._done >= len(self._actions):
            return f"pipeline rank {self._rank}, after its last pass"
        stage, kind, microbatch = self._actions[self._done]
        text = f"pipeline rank {self._rank}, stage {stage}, micro-batch {microbatch}"
        if kind == "F":
            return f"{text}, {f'recv forward from rank {config.rank_of(stage - 1)}' if stage else 'forward'}"
        if kind == "W" or stage == config.num_stages - 1:
            return f"{text}, backward"
        return f"{text}, recv backward from rank {config.rank_of(stage + 1)}"


def _ends_group(mesh: Mesh, config: PipelineConfig) -> dist.ProcessGroup | None:
    """The ranks of this pipeline's first and last stage; None where one rank holds both, or this rank holds neither.

    All ranks call this alike: a group is made for each pipeline.
    """
    ends = (config.rank_of(0), config.rank_of(config.num_stages - 1))
    if ends[0] == ends[1]:
        return None
    if config.ranks == 2:
        return mesh.group(AXIS)
    lines: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.layout.world_size):
        at = mesh.layout.coordinates(rank)
        if at[AXIS] in ends:
            lines.setdefault(tuple(at[axis] for axis in at if axis != AXIS), []).append(rank)
    own = None
    for ranks in lines.values():
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            own = group
    return own


def _as_it_is(loss: Tensor, target: Tensor) -> Tensor:
    """The last stage's pass ends in the loss itself: torch's own target is a number that has been looked up by then."""
    return loss


def _nothing(batch: Batch) -> Tensor:
    raise RuntimeError("no step is under way")


def _unmarked(part: str) -> None:
    """Before the first step."""

"""An expert's hand-written 1F1B loop on torch's `Schedule1F1B`, alone or with `parallelize_module` inside of each stage.

As in torch's tutorials: every rank cuts its part out of the whole decoder, one `PipelineStage` takes it, the schedule cuts
the batch into micro-batches, and the norm that clips is summed over the stages. The cut, the model, its initial weights and
the batches are paceline's. fp32, no compilation.

Shapes: B sequences, L positions, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

from benchmarks.handwritten import Handwritten, fused_adamw, initial_decoder
from benchmarks.ranks import Rank
from benchmarks.recipe import Recipe
from benchmarks.sides import HandwrittenSide
from benchmarks.tensor_side import as_tensor, block_plan, root_plan
from paceline.data.dataset import TokenDataset
from paceline.model.rotary import rotary_table
from paceline.model.transformer import Decoder


class StagePart(nn.Module):
    """The blocks of one stage, with the embedding on the first one, and the last norm and the output head on the last.

    Args:
        decoder: whole; the embeddings are not tied, and positions are rotary.
        layers: blocks of each stage.
        index: of this stage.
        length: L of the whole sequence, of which the residual stream may be a slice.
    """

    def __init__(self, decoder: Decoder, layers: Sequence[int], index: int, length: int) -> None:
        super().__init__()
        first, last = sum(layers[:index]), index == len(layers) - 1
        self.spec, self.length = decoder.spec, length
        self.embedding = decoder.embedding if index == 0 else None
        self.blocks = nn.ModuleList(decoder.blocks[str(n)] for n in range(first, first + layers[index]))
        self.norm = decoder.norm if last else None
        self.lm_head = decoder.lm_head if last else None

    def forward(self, entering: Tensor) -> Tensor:
        x_BLD: Tensor = entering if self.embedding is None else self.embedding(entering)
        rotary = rotary_table(self.spec, torch.arange(self.length).unsqueeze(0), x_BLD.dtype)
        for block in self.blocks:
            x_BLD = block(x_BLD, rotary)
        if self.norm is None or self.lm_head is None:
            return x_BLD
        logits_BLV: Tensor = self.lm_head(self.norm(x_BLD))
        return logits_BLV


class PipelineHandwritten(Handwritten):
    """The loop; `step()` is one optimizer step.

    Args:
        recipe: its micro-batches are those of the schedule.
        layers: blocks of each stage.
        tensor_ranks: that share each stage.
        length: of the sequences.
    """

    def __init__(
        self, recipe: Recipe, dataset: TokenDataset, layers: Sequence[int], tensor_ranks: int, length: int
    ) -> None:
        # The schedule cuts the step's batch by itself, so that it is read whole.
        whole = replace(recipe, microbatch=recipe.microbatch * recipe.accumulation, accumulation=1)
        self.recipe, self.dataset, self.rank, self.done = whole, dataset, 0, 0
        self.loss = torch.zeros(())
        mesh = init_device_mesh("cpu", (len(layers), tensor_ranks), mesh_dim_names=("pp", "tp"))
        self.stages, index = mesh["pp"].get_group(), mesh["pp"].get_local_rank()
        self.first, self.last = index == 0, index == len(layers) - 1
        self.split_vocabulary = tensor_ranks > 1
        part = StagePart(initial_decoder(recipe), layers, index, length)
        if tensor_ranks > 1:
            _split(part, mesh["tp"])
        self.model = part.train()
        stage = PipelineStage(part, index, len(layers), torch.device("cpu"), group=self.stages)
        self.schedule = Schedule1F1B(stage, recipe.accumulation, loss_fn=_mean_loss)
        self.optimizer = fused_adamw(part, recipe)

    def step(self) -> None:
        """The schedule's passes, clipping and the update."""
        ((tokens_BL, labels_BL, _),) = self.batches()
        losses: list[Tensor] = []
        with self._loss_arithmetic():
            given = (tokens_BL,) if self.first else ()
            wanted: dict[str, Any] = {"target": labels_BL, "losses": losses} if self.last else {}
            self.schedule.step(*given, return_outputs=False, **wanted)
        self.loss = torch.stack([as_tensor(loss) for loss in losses]).mean() if self.last else torch.zeros(())
        if self.recipe.clip_norm:
            self._clip()
        self.update()

    def mean_loss(self) -> float:
        """The same on every rank."""
        total = self.loss.clone()
        dist.all_reduce(total, group=self.stages)
        return float(total)

    def _loss_arithmetic(self) -> AbstractContextManager[Any]:
        """Around forward and backward: logits split by vocabulary need a loss that knows of it."""
        return loss_parallel() if self.split_vocabulary else nullcontext()

    def _clip(self) -> None:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        squares = as_tensor(torch.nn.utils.get_total_norm(gradients, foreach=True)).square()
        dist.all_reduce(squares, group=self.stages)
        torch.nn.utils.clip_grads_with_norm_(
            self.model.parameters(), self.recipe.clip_norm, squares.sqrt(), foreach=True
        )


class PipelineSide(HandwrittenSide):
    """The loop as one of the things compared, at the job's stages and tensor-parallel degree."""

    name = "Schedule1F1B"

    def __init__(self, rank: Rank, recipe: Recipe) -> None:
        resolved = rank.resolved
        self.loop = PipelineHandwritten(
            recipe, rank.data.train, resolved.pipeline.layers, resolved.layout.tp, resolved.job.data.sequence_length
        )


def _mean_loss(logits_BLV: Tensor, labels_BL: Tensor) -> Tensor:
    return F.cross_entropy(logits_BLV.flatten(0, 1), labels_BL.flatten())


def _split(part: StagePart, mesh: DeviceMesh) -> None:
    """Column- and row-wise layers in what this stage has."""
    parallelize_module(
        part, mesh, {name: style for name, style in root_plan().items() if getattr(part, name) is not None}
    )
    for block in part.blocks:
        parallelize_module(block, mesh, block_plan())

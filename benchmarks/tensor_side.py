"""An expert's hand-written tensor-parallel loop on torch's `parallelize_module`, with sequence and loss parallel.

As in torch's tutorial: column- and row-wise layers, norms over slices of the positions, logits split by vocabulary. The
model, its initial weights and the batches are paceline's; weights are distributed tensors, which the optimizer updates with
its fused kernels. fp32, no compilation; every rank reads all samples.

Shapes: B sequences, L positions, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.handwritten import Handwritten, fused_adamw, initial_decoder
from benchmarks.ranks import Rank
from benchmarks.recipe import Recipe
from benchmarks.sides import HandwrittenSide
from paceline.data.dataset import TokenDataset


def block_plan() -> dict[str, ParallelStyle]:
    """A block's layers: whole positions go into products, slices of them come out."""
    whole_attention = PrepareModuleInput(
        input_layouts=(Shard(1), None, None, None), desired_input_layouts=(Replicate(), None, None, None)
    )
    return {
        "attention_norm": SequenceParallel(),
        "attention": whole_attention,
        **{f"attention.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")},
        "attention.o_proj": RowwiseParallel(output_layouts=Shard(1)),
        "mlp_norm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
    }


def root_plan() -> dict[str, ParallelStyle]:
    """What stands before and after the blocks."""
    return {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }


class TensorHandwritten(Handwritten):
    """The loop; `step()` is one optimizer step. The embeddings are not tied."""

    def __init__(self, recipe: Recipe, dataset: TokenDataset) -> None:
        self.recipe, self.dataset, self.rank, self.done = recipe, dataset, 0, 0
        self.loss = torch.zeros(())
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        decoder = initial_decoder(recipe)
        parallelize_module(decoder, mesh, root_plan())
        for block in decoder.blocks.values():
            parallelize_module(block, mesh, block_plan())
        self.decoder = decoder.train()
        self.optimizer = fused_adamw(decoder, recipe)

    def step(self) -> None:
        """Forward, backward, clipping and the update."""
        total = torch.zeros(())
        batches = self.batches()
        for tokens_BL, labels_BL, documents in batches:
            logits_BLV = self.decoder(tokens_BL, documents=documents)
            with loss_parallel():
                loss = F.cross_entropy(logits_BLV.flatten(0, 1), labels_BL.flatten()) / len(batches)
                loss.backward()  # type: ignore[no-untyped-call]
            total += as_tensor(loss.detach())
        if self.recipe.clip_norm:
            torch.nn.utils.clip_grad_norm_(self.decoder.parameters(), self.recipe.clip_norm, foreach=True)
        self.loss = total
        self.update()

    def mean_loss(self) -> float:
        """The same on every rank."""
        return float(self.loss)


class TensorSide(HandwrittenSide):
    """The loop as one of the things compared."""

    name = "parallelize_module"

    def __init__(self, rank: Rank, recipe: Recipe) -> None:
        self.loop = TensorHandwritten(recipe, rank.data.train)


def as_tensor(value: torch.Tensor) -> torch.Tensor:
    """A number that may be distributed, as a plain tensor."""
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.detach()

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

from benchmarks.handwritten import Handwritten
from benchmarks.ranks import Rank
from benchmarks.recipe import Recipe
from paceline.data.dataset import TokenDataset
from paceline.model.init import initialise
from paceline.model.transformer import Decoder


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


class TensorHandwritten(Handwritten):
    """The loop; `step()` is one optimizer step. The embeddings are not tied."""

    def __init__(self, recipe: Recipe, dataset: TokenDataset) -> None:
        self.recipe, self.dataset, self.rank, self.done = recipe, dataset, 0, 0
        self.loss = torch.zeros(())
        with torch.device("meta"):
            decoder = Decoder(recipe.spec)
        initialise(decoder, recipe.spec, recipe.seed, "cpu")
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        root: dict[str, ParallelStyle] = {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        }
        parallelize_module(decoder, mesh, root)
        for block in decoder.blocks.values():
            parallelize_module(block, mesh, block_plan())
        self.decoder = decoder.train()
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in decoder.parameters() if p.ndim >= 2], "weight_decay": recipe.weight_decay},
                {"params": [p for p in decoder.parameters() if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=recipe.lr, betas=recipe.betas, eps=recipe.eps, fused=True,
        )  # fmt: skip

    def step(self) -> None:
        """Forward, backward, clipping and the update."""
        total = torch.zeros(())
        batches = self.batches()
        for tokens_BL, labels_BL, documents in batches:
            logits_BLV = self.decoder(tokens_BL, documents=documents)
            with loss_parallel():
                loss = F.cross_entropy(logits_BLV.flatten(0, 1), labels_BL.flatten()) / len(batches)
                loss.backward()  # type: ignore[no-untyped-call]
            total += _local(loss.detach())
        if self.recipe.clip_norm:
            torch.nn.utils.clip_grad_norm_(self.decoder.parameters(), self.recipe.clip_norm, foreach=True)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(self.done)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss = total
        self.done += 1

    def mean_loss(self) -> float:
        """The same on every rank."""
        return float(self.loss)


class TensorSide:
    """The loop as one of the things compared."""

    name = "parallelize_module"

    def __init__(self, rank: Rank, recipe: Recipe) -> None:
        self.loop = TensorHandwritten(recipe, rank.data.train)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.loop.step()

    def last_loss(self) -> float:
        return self.loop.mean_loss()

    def close(self) -> None:
        """Nothing to end."""


def _local(loss: torch.Tensor) -> torch.Tensor:
    whole = loss.full_tensor() if isinstance(loss, DTensor) else loss
    return whole.detach()

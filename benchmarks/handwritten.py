"""An expert's hand-written loop of the same model, on plain torch: what `paceline train` is measured against.

The decoder, its initial weights and the token batches are paceline's, so that both sides do the same work and reach the
same loss; everything else is what someone who knows PyTorch well writes: DistributedDataParallel whose gradients are
views of its buckets, blocks compiled one by one, bf16 autocast, fused AdamW without decay on norms, `no_sync` while
gradients accumulate. It records and prints nothing.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.handwritten JOB.pickle OUT.json

trains three steps of a pickled (Recipe, TokenDataset) and tells when the first began and ended.

Shapes: B sequences, L positions, V vocabulary, N = B x L tokens.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import pickle
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.recipe import Recipe
from paceline.data.dataset import TokenDataset
from paceline.model.attention import Documents
from paceline.model.init import initialise
from paceline.model.transformer import Decoder

HANG_SECONDS = 90.0
"""A rank that has not ended by then shows where it stands and goes: torchrun has no limit of its own."""


class Handwritten:
    """The loop; `step()` is one optimizer step. All labels are valid, so a mean of means is the mean."""

    def __init__(self, recipe: Recipe, dataset: TokenDataset, rank: int, world_size: int) -> None:
        self.recipe = recipe
        self.dataset = dataset
        self.rank = rank
        self.done = 0
        self.loss = torch.zeros(())
        decoder = initial_decoder(recipe)
        if recipe.compile:
            for block in decoder.blocks.values():
                block.compile(dynamic=False)
        self.model = self.wrap(decoder)
        self.model.train()
        self.optimizer = fused_adamw(self.model, recipe)

    def wrap(self, decoder: Decoder) -> torch.nn.Module:
        """The decoder under its strategy."""
        return DistributedDataParallel(decoder, gradient_as_bucket_view=True)

    def synchronised(self, last: bool) -> AbstractContextManager[Any]:
        """Around a micro-batch: gradients are reduced in the last one's backward."""
        assert isinstance(self.model, DistributedDataParallel)
        return nullcontext() if last else self.model.no_sync()

    def arithmetic(self) -> AbstractContextManager[Any]:
        """Around a forward pass."""
        return torch.autocast("cpu", torch.bfloat16, enabled=self.recipe.precision == "bf16")

    def step(self) -> None:
        """Forward, backward, one reduction, clipping and the update."""
        recipe = self.recipe
        total = torch.zeros(())
        batches = self.batches()
        for index, (tokens_BL, labels_BL, documents) in enumerate(batches):
            last = index == len(batches) - 1
            with self.synchronised(last):
                with self.arithmetic():
                    logits_BLV = self.model(tokens_BL, documents=documents)
                loss = F.cross_entropy(logits_BLV.float().flatten(0, 1), labels_BL.flatten()) / len(batches)
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        if recipe.clip_norm:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip_norm, foreach=True)
        self.loss = total
        self.update()

    def update(self) -> None:
        """The optimizer's step at the schedule's learning rate; gradients are let go."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(self.done)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.done += 1

    def batches(self) -> list[tuple[Tensor, Tensor, Documents | None]]:
        """This rank's micro-batches of the next step, read from the mapped shards."""
        recipe = self.recipe
        per_rank = recipe.microbatch * recipe.accumulation
        first = self.done * recipe.global_batch + self.rank * per_rank
        indices = self.dataset.indices_at(recipe.seed, np.arange(first, first + per_rank))
        return [self._batch(indices[at : at + recipe.microbatch]) for at in range(0, per_rank, recipe.microbatch)]

    def _batch(
        self, indices: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    ) -> tuple[Tensor, Tensor, Documents | None]:
        batch = self.dataset.batch(indices)
        documents = None
        if "cumulative" in batch:
            documents = Documents(torch.from_numpy(batch["cumulative"]), int(batch["max_length"]))
        return torch.from_numpy(batch["tokens"]), torch.from_numpy(batch["labels"]), documents

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then a cosine down to the floor."""
        recipe = self.recipe
        if step < recipe.warmup_steps:
            return recipe.lr * (step + 1) / recipe.warmup_steps
        progress = min(1.0, (step - recipe.warmup_steps) / max(1, recipe.steps - recipe.warmup_steps))
        floor = recipe.min_lr_ratio
        return recipe.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))

    def mean_loss(self) -> float:
        """The last step's loss over all ranks; every rank calls it."""
        total = self.loss.clone()
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()


def initial_decoder(recipe: Recipe) -> Decoder:
    """The decoder with its initial weights."""
    with torch.device("meta"):
        decoder = Decoder(recipe.spec)
    initialise(decoder, recipe.spec, recipe.seed, "cpu")
    return decoder


def fused_adamw(model: torch.nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW over a model's parameters, without decay on norms."""
    return torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": recipe.weight_decay},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=recipe.lr,
        betas=recipe.betas,
        eps=recipe.eps,
        fused=True,
    )


def main(job: str, out: str) -> None:
    """Three steps under torchrun; rank 0 leaves the times of the first (seconds since the epoch)."""
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    recipe, dataset = pickle.loads(Path(job).read_bytes())
    loop = Handwritten(recipe, dataset, rank, world_size)
    began = time.time()
    loop.step()
    ended = time.time()
    for _ in range(2):
        loop.step()
    loss = loop.mean_loss()
    if rank == 0:
        told = {"began": began, "ended": ended, "loss": loss, "threads": torch.get_num_threads(), "pid": os.getpid()}
        Path(out).write_text(json.dumps(told), encoding="utf-8")
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(*sys.argv[1:])

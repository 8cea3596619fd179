"""Hugging Face Accelerate: its own wrapping, loader, accumulation and clipping around the loop that its guide shows."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from benchmarks.peers.in_order import InOrder, fresh_decoder, fused_adamw, schedule_factor
from benchmarks.ranks import Rank
from benchmarks.recipe import Recipe


class AccelerateSide:
    """The loop of Accelerate's guide on the process group that is there."""

    name = "accelerate"

    def __init__(self, rank: Rank, recipe: Recipe) -> None:
        self.recipe = recipe
        precision = "bf16" if recipe.precision == "bf16" else "no"
        self.accelerator = Accelerator(
            cpu=True, mixed_precision=precision, gradient_accumulation_steps=recipe.accumulation
        )
        if self.accelerator.num_processes != rank.world.world_size:
            raise RuntimeError(f"accelerate trains {self.accelerator.num_processes} process(es)")
        decoder = fresh_decoder(recipe)
        optimizer = fused_adamw(recipe, decoder)
        self.schedule = LambdaLR(optimizer, lambda step: schedule_factor(recipe, step))
        loader = DataLoader(InOrder(recipe, rank.data.train), batch_size=recipe.microbatch, shuffle=False)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(decoder, optimizer, loader)
        self.model.train()
        self.batches = iter(self.loader)
        self.loss = torch.zeros(())

    def run(self, steps: int) -> None:
        for _ in range(steps):
            total = torch.zeros(())
            for _ in range(self.recipe.accumulation):
                total += self._microbatch(next(self.batches))
            self.schedule.step()
            self.loss = total / self.recipe.accumulation

    def _microbatch(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with self.accelerator.accumulate(self.model):
            logits_BLV = self.model(batch["tokens"])
            loss = F.cross_entropy(logits_BLV.float().flatten(0, 1), batch["labels"].flatten())
            self.accelerator.backward(loss)
            if self.accelerator.sync_gradients and self.recipe.clip_norm:
                self.accelerator.clip_grad_norm_(self.model.parameters(), self.recipe.clip_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.detach()

    def last_loss(self) -> float:
        total = self.loss.clone()
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()

    def close(self) -> None:
        """Nothing to end."""

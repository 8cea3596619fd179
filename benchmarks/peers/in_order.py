"""Samples in the order in which paceline reads them, for loaders that read a data set from front to back."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from benchmarks.recipe import Recipe
from paceline.data.dataset import TokenDataset
from paceline.model.init import initialise
from paceline.model.transformer import Decoder


class InOrder(Dataset[dict[str, Tensor]]):
    """Position p of a run. Ranks that take batches in turn read paceline's very micro-batches without accumulation."""

    def __init__(self, recipe: Recipe, dataset: TokenDataset) -> None:
        self.dataset = dataset
        self.samples = dataset.indices_at(recipe.seed, np.arange(recipe.steps * recipe.global_batch))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, position: int) -> dict[str, Tensor]:
        sample = self.dataset[int(self.samples[position])]
        return {"tokens": torch.from_numpy(sample["tokens"]), "labels": torch.from_numpy(sample["labels"])}


def fresh_decoder(recipe: Recipe) -> Decoder:
    """The decoder with paceline's initial weights, its blocks compiled where the recipe says so."""
    with torch.device("meta"):
        decoder = Decoder(recipe.spec)
    initialise(decoder, recipe.spec, recipe.seed, "cpu")
    if recipe.compile:
        for block in decoder.blocks.values():
            block.compile(dynamic=False)
    return decoder


def fused_adamw(recipe: Recipe, module: nn.Module) -> torch.optim.AdamW:
    """Fused AdamW; norms do not decay."""
    decayed = [p for p in module.parameters() if p.ndim >= 2]
    others = [p for p in module.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps, fused=True)


def schedule_factor(recipe: Recipe, step: int) -> float:
    """The learning rate of a step as a share of the peak."""
    if step < recipe.warmup_steps:
        return (step + 1) / recipe.warmup_steps
    progress = min(1.0, (step - recipe.warmup_steps) / max(1, recipe.steps - recipe.warmup_steps))
    floor = recipe.min_lr_ratio
    return floor + (1 - floor) * 0.5 * (1 + float(np.cos(np.pi * progress)))

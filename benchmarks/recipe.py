"""What the hand-written loop and the peers train: the plain figures of a resolved job. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.job.resolve import Resolved
from paceline.model.spec import ModelSpec


@dataclass(frozen=True)
class Recipe:
    """Model, batch and optimizer of a run whose schedule is warm-up and cosine."""

    spec: ModelSpec
    seed: int
    steps: int
    global_batch: int
    microbatch: int
    accumulation: int
    lr: float
    warmup_steps: int
    min_lr_ratio: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip_norm: float
    precision: str
    compile: bool


def recipe_of(resolved: Resolved, precision: str | None = None, compiled: bool | None = None) -> Recipe:
    """The recipe of a job, at another precision or compilation where given.

    Raises:
        ValueError: the job has a schedule or an optimizer that the hand-written loop lacks.
    """
    optimizer = resolved.job.optimizer
    if (optimizer.name, optimizer.schedule, optimizer.lr_scaling) != ("adamw", "cosine", "none"):
        raise ValueError("the hand-written loop knows AdamW with a cosine schedule alone")
    recipe = Recipe(
        spec=resolved.spec, seed=resolved.job.run.seed, steps=resolved.steps or 0,
        global_batch=resolved.batch.global_batch, microbatch=resolved.batch.microbatch,
        accumulation=resolved.batch.accumulation, lr=optimizer.lr, warmup_steps=int(optimizer.warmup_steps),
        min_lr_ratio=optimizer.min_lr_ratio, betas=optimizer.betas, eps=optimizer.eps,
        weight_decay=optimizer.weight_decay, clip_norm=optimizer.clip_norm,
        precision=resolved.precision, compile=resolved.compile,
    )  # fmt: skip
    return replace(
        recipe,
        precision=recipe.precision if precision is None else precision,
        compile=recipe.compile if compiled is None else compiled,
    )

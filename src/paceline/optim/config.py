"""`[optimizer]`: the update rule, its schedule, clipping, and how the learning rate follows the global batch."""

from typing import Annotated, Literal

from msgspec import Meta

from paceline.config import AUTO, Section
from paceline.units import Count

NonNegative = Annotated[float, Meta(ge=0)]


class OptimizerSection(Section, frozen=True):
    """Optimizer, schedule, clipping and the rule for bad steps."""

    name: Annotated[Literal["adamw", "sgd"], Meta(description="The update rule.")] = "adamw"
    lr: Annotated[NonNegative, Meta(description="Peak learning rate, at `lr_reference_batch` where scaling is on.")] = (
        3e-3
    )
    betas: Annotated[tuple[NonNegative, NonNegative], Meta(description="AdamW's decay rates.")] = (0.9, 0.95)
    eps: Annotated[NonNegative, Meta(description="AdamW's epsilon.")] = 1e-8
    momentum: Annotated[NonNegative, Meta(description="SGD's momentum.")] = 0.0
    weight_decay: Annotated[NonNegative, Meta(description="Decay of matrices; norms and biases never decay.")] = 0.1
    clip_norm: Annotated[NonNegative, Meta(description="Largest global gradient norm; 0 turns clipping off.")] = 1.0
    schedule: Annotated[
        Literal["constant", "linear", "cosine", "wsd"],
        Meta(description="Shape after the warm-up; wsd is warm-up, stable, decay."),
    ] = "cosine"
    warmup_steps: Annotated[Count, Meta(description="Steps of linear warm-up.")] = Count(50)
    decay_steps: Annotated[
        Count | None, Meta(description="Length of wsd's final decay. auto: a fifth of the run.", extra=AUTO)
    ] = None
    min_lr_ratio: Annotated[
        NonNegative, Meta(le=1, description="Learning rate at the end, as a share of the peak.")
    ] = 0.1
    lr_reference_batch: Annotated[
        Count | None, Meta(description="The global batch at which `lr` was tuned; needed by `lr_scaling`.")
    ] = None
    lr_scaling: Annotated[
        Literal["none", "linear", "sqrt", "auto"],
        Meta(
            description="How the learning rate follows global_batch / lr_reference_batch. "
            "auto: linear up to 1024 sequences, square root from there."
        ),
    ] = "none"
    bad_step: Annotated[
        Literal["skip", "stop"],
        Meta(description="What to do with a step whose gradient norm is not finite; all ranks decide alike."),
    ] = "skip"
    max_bad_steps: Annotated[Count, Meta(description="Bad steps in a row that end the run.")] = Count(5)

    def __post_init__(self) -> None:
        if any(beta >= 1 for beta in self.betas):
            raise ValueError(f"betas = {list(self.betas)} must be below 1")
        if self.lr_scaling != "none" and not self.lr_reference_batch:
            raise ValueError(
                f'lr_scaling = "{self.lr_scaling}" needs lr_reference_batch, the global batch of lr = {self.lr}'
            )

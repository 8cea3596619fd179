"""What recomputation frees and what it costs, beside the model's own figures. Imports no torch."""

from __future__ import annotations

from paceline.model.flop import ActivationBytes, hardware_flop_per_token, training_flop_per_token
from paceline.model.spec import ModelSpec
from paceline.parallel.recompute.config import Recompute


def extra_flop_share(spec: ModelSpec, sequence_length: int, recompute: Recompute) -> float:
    """Matrix products done again, as a share of those of a step; elementwise work is not counted by any convention."""
    model_flop = training_flop_per_token(spec, sequence_length)
    return hardware_flop_per_token(spec, sequence_length, recompute) / model_flop - 1


def peak_bytes(activations: ActivationBytes, recompute: Recompute, logits_bytes: int) -> int:
    """Activations at the peak of a step, less the logits and the loss.

    The peak is either at the loss, beside `logits_bytes`, or later in a block's backward, when the logits are gone and
    what that block keeps stands whole: the larger of the two counts.
    """
    kept = activations.total - activations.logits_and_loss
    if recompute == "none":
        return kept
    return kept + max(0, activations.recomputed_block - logits_bytes)

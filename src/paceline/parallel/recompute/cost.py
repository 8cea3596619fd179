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

    With recomputation there are three moments: the end of the forward, with autocast's copies of all weights (the loss
    has not made the logits' gradient yet, half of `logits_bytes`); the loss's backward; and a block's backward, when the
    logits are gone and what that block keeps stands whole. The largest counts.
    """
    kept = activations.total - activations.logits_and_loss
    if recompute == "none":
        return kept
    forward_end = activations.forward_copies - logits_bytes // 2
    return kept + max(0, forward_end, activations.recomputed_block - logits_bytes)

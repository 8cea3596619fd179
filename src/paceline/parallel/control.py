"""What all ranks agree on once a step, whatever the strategies: loss and votes, and the gradient's norm. No torch."""

from __future__ import annotations

from paceline.parallel.layout import SHARDS, Layout, axes_name
from paceline.parallel.strategy import Collective

VOTES = ("save", "busy", "stop")
"""What ranks tell each other with every step: that a save is due, that the one before is still being written, and that
somebody has asked this rank to stop."""

CONTROL_BYTES = 8 * (2 + len(VOTES))
"""Loss sum, weight and votes, in float64."""

NORM_BYTES = 8
"""The sum of squares of a rank's gradients, in float64."""


def control(layout: Layout) -> tuple[Collective, ...]:
    """The collectives of one optimizer step. Replicas hold equal gradients: their norm costs nothing."""
    if layout.world_size == 1:
        return ()
    world = axes_name(layout)
    norm = world if layout.tp > 1 or layout.pp > 1 else axes_name(layout, SHARDS) if layout.shards > 1 else None
    loss = Collective("all_reduce", world, 1, CONTROL_BYTES, "backward", "loss")
    if norm is None:
        return (loss,)
    return (loss, Collective("all_reduce", norm, 1, NORM_BYTES, "nothing", "gradient norm"))

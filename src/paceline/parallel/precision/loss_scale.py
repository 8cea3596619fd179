"""The dynamic loss scale of fp16: small gradients are lifted into fp16's range, and overflows lower the lift.

Every decision follows from the gradient norm over all ranks, which all ranks have alike: so they agree without a word.
Micikevicius et al. 2018, arXiv 1710.03740, section 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.parallel.precision.config import GROWTH_STEPS, INITIAL_LOSS_SCALE, MIN_LOSS_SCALE


@dataclass
class LossScale:
    """A factor on the loss, halved at each overflow, doubled after `growth_steps` steps without one.

    A power of two throughout, so that scaling rounds nothing.
    """

    scale: float = INITIAL_LOSS_SCALE
    growth_steps: int = GROWTH_STEPS
    steps_since_change: int = 0

    @property
    def at_floor(self) -> bool:
        """Whether an overflow can no longer be blamed on the scale."""
        return self.scale <= MIN_LOSS_SCALE

    def overflowed(self) -> None:
        """After a step whose gradients were not finite."""
        self.scale = max(MIN_LOSS_SCALE, self.scale / 2)
        self.steps_since_change = 0

    def succeeded(self) -> None:
        """After a step that was taken."""
        self.steps_since_change += 1
        if self.steps_since_change >= self.growth_steps:
            self.scale, self.steps_since_change = self.scale * 2, 0

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint has to keep."""
        return {"scale": self.scale, "steps_since_change": self.steps_since_change}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale, self.steps_since_change = float(state["scale"]), int(state["steps_since_change"])

"""A tensor as one rank holds it: what a save takes and a load fills."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paceline.checkpoint.boxes import Box


@dataclass(frozen=True)
class Placed:
    """The box of a named tensor that this rank holds.

    Attributes:
        name: `model/<parameter>`, `optimizer/<kind>/<parameter>`, `buffer/<rank>/<name>`.
        tensor: contiguous, of `box.shape`, on any device.
        box: where it lies in the whole tensor.
        shape: of the whole tensor.
    """

    name: str
    tensor: Tensor
    box: Box
    shape: tuple[int, ...]

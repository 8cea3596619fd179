"""What offloaded moments leave with the weights, and what an update moves. Imports no torch."""

from __future__ import annotations

from paceline.parallel.offload.config import Place

CHUNK_ELEMENTS = 2**22
"""Weights updated at a time: 32 MiB of two float32 moments. A power of two, so that vector kernels see the same tails as
on whole tensors and results stay bitwise equal."""


def resident_moments_bytes(moments_bytes: int, elements: int, tensors: int, element_bytes: int, place: Place) -> int:
    """Moments in the memory of a rank's device at the peak of the update: a chunk of both, and the step counts."""
    if place == "none":
        return moments_bytes
    return min(moments_bytes, 2 * min(elements, CHUNK_ELEMENTS) * element_bytes + tensors * 4)


def moved_bytes(elements: int, element_bytes: int, place: Place) -> int:
    """Bytes that one update reads from the place and writes back to it: both moments, both ways."""
    return 0 if place == "none" else 4 * elements * element_bytes

"""Boxes of a tensor: which part of a stored piece goes where in what a rank holds. Arithmetic alone, no torch.

A box is an offset and a shape, one number per dim. A tensor without dims has one box, ((), ()).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Box(NamedTuple):
    """Indices `offset[d]` to `offset[d] + shape[d]` in each dim d."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class Placement(NamedTuple):
    """What a rank holds of a tensor of `shape`: the box of it. Strategies state one for each parameter."""

    box: Box
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Iterable[int]) -> Placement:
        """All of it."""
        extent = tuple(shape)
        return cls(Box((0,) * len(extent), extent), extent)

    @classmethod
    def rows(cls, shape: Iterable[int], part: int, parts: int) -> Placement:
        """Part number `part` of equal parts of the first dim, the last ones shorter or empty."""
        extent = tuple(shape)
        each = -(-extent[0] // parts)
        begin = min(part * each, extent[0])
        rest = (0,) * (len(extent) - 1)
        return cls(Box((begin, *rest), (min(each, extent[0] - begin), *extent[1:])), extent)

    def within(self, outer: Placement) -> Placement:
        """This part of a part: `outer` places in the whole tensor what this one takes as the whole."""
        offset = tuple(a + b for a, b in zip(outer.box.offset, self.box.offset, strict=True))
        return Placement(Box(offset, self.box.shape), outer.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index of the whole tensor."""
        return tuple(slice(at, at + extent) for at, extent in zip(self.box.offset, self.box.shape, strict=True))


class Overlap(NamedTuple):
    """The part that two boxes share: where it begins in each of them, and its extent."""

    in_first: tuple[int, ...]
    in_second: tuple[int, ...]
    shape: tuple[int, ...]


def overlap(first: Box, second: Box) -> Overlap | None:
    """What both boxes hold; None where that is nothing."""
    begin = tuple(max(a, b) for a, b in zip(first.offset, second.offset, strict=True))
    ends = zip(first.offset, first.shape, second.offset, second.shape, strict=True)
    end = tuple(min(a + m, b + n) for a, m, b, n in ends)
    shape = tuple(e - b for b, e in zip(begin, end, strict=True))
    if any(extent <= 0 for extent in shape):
        return None
    return Overlap(
        tuple(b - a for b, a in zip(begin, first.offset, strict=True)),
        tuple(b - a for b, a in zip(begin, second.offset, strict=True)),
        shape,
    )


def rows(box: Box, row_elements: int) -> Iterator[Box]:
    """The box cut along its first dim into boxes of about `row_elements` elements, at least one row each."""
    if not box.shape or box.elements == 0:
        yield box
        return
    step = max(1, row_elements // max(1, math.prod(box.shape[1:])))
    for begin in range(0, box.shape[0], step):
        extent = min(step, box.shape[0] - begin)
        yield Box((box.offset[0] + begin, *box.offset[1:]), (extent, *box.shape[1:]))


def tiles(boxes: list[Box], shape: tuple[int, ...]) -> bool:
    """Whether the boxes cover a tensor of `shape`, each element once."""
    whole = Box((0,) * len(shape), shape)
    inside = all(
        len(b.offset) == len(shape) and all(o >= 0 and o + n <= s for o, n, s in zip(b.offset, b.shape, shape, strict=True))
        for b in boxes
    )  # fmt: skip
    if not inside or sum(b.elements for b in boxes) != whole.elements:
        return False
    ordered = sorted(b for b in boxes if b.elements)
    return all(overlap(a, b) is None for i, a in enumerate(ordered) for b in _near(ordered, i))


def _near(ordered: list[Box], index: int) -> Iterator[Box]:
    """Later boxes that may overlap box `index`: those that begin before it ends in the first dim."""
    box = ordered[index]
    for other in ordered[index + 1 :]:
        if box.offset and other.offset[0] >= box.offset[0] + box.shape[0]:
            return
        yield other

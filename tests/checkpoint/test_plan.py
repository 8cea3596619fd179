"""Who writes what: every element once, about equal bytes, the same plan on every rank."""

from __future__ import annotations

import random

import pytest

from paceline.checkpoint.boxes import Box, Placement, tiles
from paceline.checkpoint.header import safetensors_header
from paceline.checkpoint.piece_file import NewPiece
from paceline.checkpoint.pieces import PIECE_BYTES
from paceline.checkpoint.plan import Image, plan_images

Lists = list[list[NewPiece]]
SHAPES = {
    "embed": (5003, 1024),
    "wide": (40_000_001,),
    "one": (1, 9_000_000),
    "odd": (129, 3),
    "norm": (7,),
    "step": (),
}


def whole(name: str, shape: tuple[int, ...], dtype: str = "F32") -> NewPiece:
    return NewPiece(name, dtype, shape, Placement.whole(shape).box)


def replicated(ranks: int) -> Lists:
    return [[whole(name, shape) for name, shape in SHAPES.items()] for _ in range(ranks)]


def sharded(ranks: int) -> Lists:
    return [
        [
            NewPiece(n, "F32", s, (Placement.rows(s, rank, ranks) if s else Placement.whole(s)).box)
            for n, s in SHAPES.items()
        ]
        + [whole(f"buffer/{rank}/x", (rank + 1,), "BF16")]
        for rank in range(ranks)
    ]


def hybrid(shard: int, replicate: int) -> Lists:
    """Rows over `shard` ranks, each part on `replicate` ranks."""
    lists = sharded(shard)
    return [[p for p in lists[rank % shard] if not p.name.startswith("buffer/")] for rank in range(shard * replicate)]


def written(images: list[Image]) -> dict[str, list[Box]]:
    boxes: dict[str, list[Box]] = {}
    for image in images:
        for piece in image.pieces:
            boxes.setdefault(piece.name, []).append(piece.box)
    return boxes


CASES = {
    **{f"replicated-{n}": replicated(n) for n in (1, 2, 3, 8)},
    **{f"sharded-{n}": sharded(n) for n in (2, 3, 5)},
    "hybrid-2x2": hybrid(2, 2),
    "hybrid-3x2": hybrid(3, 2),
}


@pytest.mark.parametrize("held", CASES.values(), ids=CASES)
def test_every_element_is_written_once_by_a_rank_that_holds_it(held: Lists) -> None:
    images = plan_images(held)
    boxes = written(images)
    shapes = {p.name: p.shape for pieces in held for p in pieces}
    assert boxes.keys() == shapes.keys()
    assert all(tiles(boxes[name], shape) for name, shape in shapes.items())
    for image, mine in zip(images, held, strict=True):
        own = {p.name: p.box for p in mine}
        for piece in image.pieces:
            assert all(
                o <= b and b + n <= o + e
                for o, e, b, n in zip(*own[piece.name], *piece.box, strict=True)  # type: ignore[misc]
            )


@pytest.mark.parametrize("case", ["replicated-2", "replicated-3", "replicated-8", "hybrid-2x2", "hybrid-3x2"])
def test_ranks_that_hold_the_same_write_equal_bytes_within_one_piece(case: str) -> None:
    held = CASES[case]
    largest = max(p.size_bytes for image in plan_images(held) for p in image.pieces)
    groups: dict[str, list[int]] = {}
    for image, pieces in zip(plan_images(held), held, strict=True):
        groups.setdefault(str(pieces), []).append(image.size_bytes - image.header_bytes)
    assert len(groups) == {"hybrid-2x2": 2, "hybrid-3x2": 3}.get(case, 1)
    for sizes in groups.values():
        assert max(sizes) - min(sizes) <= largest


def test_pieces_are_small_where_rows_allow_it() -> None:
    sizes = {p.name: p.size_bytes for image in plan_images(replicated(1)) for p in image.pieces}
    assert sizes.pop("one") == 36_000_000
    assert max(sizes.values()) <= PIECE_BYTES


@pytest.mark.parametrize("held", CASES.values(), ids=CASES)
def test_the_plan_is_the_same_whatever_order_the_lists_are_in(held: Lists) -> None:
    shuffled = [random.Random(rank).sample(pieces, len(pieces)) for rank, pieces in enumerate(held)]
    assert plan_images(shuffled) == plan_images(held)


def test_a_file_is_laid_out_without_gaps_and_aligned() -> None:
    held = [[whole("a", (3,), "BF16"), whole("b", (5,), "F64"), whole("c", (3,), "BOOL"), whole("d", (), "F32")]]
    (image,) = plan_images(held)
    assert [p.name for p in image.pieces] == ["b", "d", "a", "c"]
    assert len(image.header()) == image.header_bytes and image.header_bytes % 64 == 0
    assert image.size_bytes == image.header_bytes + 40 + 4 + 6 + 3
    begins = [begin - image.header_bytes for _, begin, _ in image.spans()]
    assert begins == [0, 40, 44, 50]
    assert image.header() == safetensors_header(
        [
            ("b@0", "F64", (5,), 0, 40),
            ("d@", "F32", (), 40, 44),
            ("a@0", "BF16", (3,), 44, 50),
            ("c@0", "BOOL", (3,), 50, 53),
        ]
    )


def test_a_rank_without_anything_to_write_has_no_file() -> None:
    images = plan_images([[whole("a", (3,))], [whole("a", (3,))]])
    assert images[0].size_bytes > 12 and images[1].size_bytes == 0 and not images[1].pieces


@pytest.mark.parametrize(
    ("lists", "text"),
    [
        ([[whole("a", (4,))], [whole("a", (4,), "F16")]], "a is .*F32.* on one rank and .*F16.* on rank 1"),
        ([[NewPiece("a", "F32", (4,), Box((0,), (2,)))]], "boxes of a do not tile"),
        ([[whole("a", (4,))], [NewPiece("a", "F32", (4,), Box((1,), (2,)))]], "boxes of a do not tile"),
        ([[whole("a", (4,)), whole("a", (4,))]], "rank 0 holds the box .* of a twice"),
    ],
)
def test_boxes_that_cannot_be_a_tensor_are_refused(lists: Lists, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        plan_images(lists)

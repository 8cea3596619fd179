"""The collectives on real values: what is right passes, and what is wrong is counted."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from paceline.bench.calls import TYPES, Exchange, values
from paceline.bench.sweep import COLLECTIVES, ELEMENT_BYTES, Point, points
from paceline.parallel.strategy import CollectiveKind
from tests.pool.pool import Pool

SIZES = [64, 4096, 3 * 2**20]


def made(kind: CollectiveKind, ranks: int, dtype: str) -> tuple[Exchange, list[Point]]:
    found = points(kind, SIZES, ranks, ELEMENT_BYTES[dtype])
    group = dist.group.WORLD
    assert group is not None
    return Exchange(kind, found[-1], list(range(ranks)), group, TYPES[dtype], torch.device("cpu")), found


def wrong_of_all(rank: int, ranks: int, dtype: str) -> dict[str, list[int]]:
    """Wrong elements by collective and size; timed calls come before, as in a sweep."""
    found = {}
    for kind in COLLECTIVES:
        exchange, sizes = made(kind, ranks, dtype)
        found[kind] = []
        for point in sizes:
            for _ in range(3):
                exchange.at(point)()
            found[kind].append(exchange.wrong(point))
    return found


@pytest.mark.parametrize(("ranks", "dtype"), [(2, "fp32"), (3, "bf16"), (4, "fp32")])
def test_every_collective_gives_what_it_must(pool: Pool, ranks: int, dtype: str) -> None:
    for found in pool.run(wrong_of_all, ranks, dtype, timeout=60):
        assert set(found) == set(COLLECTIVES)
        assert {kind: sum(wrong) for kind, wrong in found.items()} == dict.fromkeys(COLLECTIVES, 0)


def wrong_after_damage(rank: int, ranks: int, damage: str) -> dict[str, int]:
    """Wrong elements of a rank where the engine's result is damaged on rank 1."""
    found = {}
    for kind in COLLECTIVES:
        exchange, sizes = made(kind, ranks, "fp32")
        point = sizes[1]
        true_at = exchange.at

        def at(point: Point, exchange: Exchange = exchange, true_at: object = true_at) -> object:
            call = true_at(point)  # type: ignore[operator]

            def damaged() -> None:
                if damage == "no call":
                    return
                call()
                if rank == 1 and damage == "one element":
                    exchange._received[7] += 1
                if rank == 1 and damage == "shifted":
                    received = exchange._received[: exchange._lengths(point)[1]]
                    received.copy_(received.roll(1))

            return damaged

        exchange.at = at  # type: ignore[method-assign, assignment]
        found[kind] = exchange.wrong(point)
    return found


@pytest.mark.parametrize("damage", ["one element", "shifted", "no call"])
def test_a_wrong_result_is_counted(pool: Pool, damage: str) -> None:
    by_rank = pool.run(wrong_after_damage, 2, damage, timeout=60)
    for kind in COLLECTIVES:
        counts = [found[kind] for found in by_rank]
        if damage == "one element":
            assert counts == [0, 1], kind
        elif damage == "shifted":
            assert counts[0] == 0 and counts[1] > 100, (kind, counts)
        else:
            # The root of a broadcast has what it sends.
            assert all(c > 100 for c in (counts[1:] if kind == "broadcast" else counts)), (kind, counts)


def test_values_have_exact_sums_and_depend_on_rank_and_element() -> None:
    for ranks, dtype in ((2, torch.bfloat16), (100, torch.bfloat16), (1000, torch.float16), (4, torch.float32)):
        total = torch.stack([values(rank, 0, 600, ranks, dtype) for rank in range(ranks)]).sum(dim=0)
        assert torch.equal(total.to(dtype).to(torch.float64), total)
    one, other = (values(rank, 0, 600, 4, torch.float32) for rank in (0, 1))
    assert not torch.equal(one, other) and len(set(one.tolist())) > 100
    assert torch.equal(values(1, 100, 50, 4, torch.float32), other[100:150])

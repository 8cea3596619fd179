"""Sizes and counts are nccl-tests'; what does not fit is refused with numbers."""

from __future__ import annotations

import pytest

from paceline.bench.sweep import COLLECTIVES, Options, check_memory, memory_bytes, points, sizes
from paceline.errors import UsageError
from paceline.units import GiB, KiB, MiB, parse_bytes


def test_sizes_grow_by_the_factor_and_end_at_the_largest() -> None:
    assert sizes(8, 128, 4) == [8, 32, 128]
    assert sizes(1 * KiB, 1 * KiB, 2) == [1 * KiB]
    for wrong in ((0, 8, 2), (16, 8, 2), (8, 16, 1)):
        with pytest.raises(UsageError, match="name no sizes"):
            sizes(*wrong)


# size and count as `all_gather_perf -b 1M -e 1M`, `reduce_scatter_perf` and so on print them on 4 and on 3 ranks.
@pytest.mark.parametrize(
    ("collective", "ranks", "size_bytes", "count"),
    [
        ("all_reduce", 4, 1048576, 262144),
        ("broadcast", 4, 1048576, 262144),
        ("send_recv", 4, 1048576, 262144),
        ("all_gather", 4, 1048576, 65536),
        ("reduce_scatter", 4, 1048576, 65536),
        ("all_to_all", 4, 1048576, 65536),
        ("all_gather", 3, 1048560, 87380),
        ("reduce_scatter", 3, 1048560, 87380),
    ],
)
def test_size_and_count_are_those_of_nccl_tests(collective: str, ranks: int, size_bytes: int, count: int) -> None:
    (point,) = points(collective, [1 * MiB], ranks, 4)  # type: ignore[arg-type]
    assert (point.size_bytes, point.count) == (size_bytes, count)


def test_sizes_without_an_element_per_rank_are_left_out_and_equal_ones_come_once() -> None:
    assert [p.size_bytes for p in points("all_gather", [4, 8, 16, 32, 40, 64], 2, 4)] == [32, 64]
    assert [p.size_bytes for p in points("all_reduce", [1, 4, 5, 8], 2, 4)] == [4, 8]


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_sizes_over_memory_are_refused_with_what_is_needed_and_what_fits(collective: str) -> None:
    options = Options(collectives=(collective,), max_bytes=64 * GiB)  # type: ignore[arg-type]
    with pytest.raises(UsageError) as refused:
        check_memory(options, 2, 2, "gloo", 8 * GiB)
    needed = memory_bytes(collective, 64 * GiB, 2, "gloo") * 2  # type: ignore[arg-type]
    assert refused.value.values["needed_bytes"] == needed >= 128 * GiB
    assert f"{collective} of 64.0 GiB needs" in refused.value.message and "8.00 GiB are there" in refused.value.message
    advised = int(parse_bytes(str(refused.value.hint).split("--max ")[1].split(" ")[0]))
    check_memory(options._replace(max_bytes=advised), 2, 2, "gloo", 8 * GiB)
    with pytest.raises(UsageError):
        check_memory(options._replace(max_bytes=2 * advised), 2, 2, "gloo", 8 * GiB)

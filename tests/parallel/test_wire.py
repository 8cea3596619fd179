"""Bus factors are nccl-tests', and reduce-scatter moves what it moves."""

from __future__ import annotations

import pytest

from paceline.parallel.strategy import CollectiveKind
from paceline.parallel.wire import bus_factor, sent_bytes


# BL-73: right for n = 2 (factor 1.0) and n = 4 (1.5).
@pytest.mark.parametrize(
    ("kind", "two", "four"),
    [
        ("all_reduce", 1.0, 1.5),
        ("reduce_scatter", 0.5, 0.75),
        ("all_gather", 0.5, 0.75),
        ("all_to_all", 0.5, 0.75),
        ("broadcast", 1.0, 1.0),
        ("send_recv", 1.0, 1.0),
    ],
)
def test_bus_factors_are_those_of_nccl_tests(kind: CollectiveKind, two: float, four: float) -> None:
    assert (bus_factor(kind, 2), bus_factor(kind, 4)) == (two, four)


def test_reduce_scatter_and_all_gather_together_are_an_all_reduce() -> None:
    for ranks in (2, 3, 8, 72):
        parts = bus_factor("reduce_scatter", ranks) + bus_factor("all_gather", ranks)
        assert parts == pytest.approx(bus_factor("all_reduce", ranks))


def test_gloo_s_reduce_scatter_is_counted_as_an_all_reduce() -> None:
    assert sent_bytes("reduce_scatter", 1000, 4, "gloo") == sent_bytes("all_reduce", 1000, 4, "gloo") == 1500
    assert sent_bytes("reduce_scatter", 1000, 4, "nccl") == 750
    assert sent_bytes("all_reduce", 1000, 1, "gloo") == 0

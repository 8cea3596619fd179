"""What figures mean: shares of a link, in-network reduction, a change since a stored result."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from paceline.bench.remarks import about_backend, against_baseline, against_link, busy, wrong_results
from paceline.bench.rows import GB, Row, make_row
from paceline.bench.sweep import Point
from paceline.cluster.catalogue import node_link
from paceline.units import GiB, MiB

A100, H200 = "NVIDIA A100-SXM4-80GB", "NVIDIA H200"


def all_reduce(bus_bandwidth: float, size: int = 1 * GiB, ranks: int = 8, spread: float = 0.01, wrong: int = 0) -> Row:
    """An all-reduce in the node whose bus bandwidth is this many GB/s."""
    seconds = 2 * (ranks - 1) / ranks * size / (bus_bandwidth * GB)
    samples = [seconds * (1 - 2 * spread), seconds, seconds * (1 + 2 * spread)]
    return make_row(Point("all_reduce", size, size // 4), "in_node", ranks, 1, "fp32", [samples], wrong)


def link(rows: list[Row], device: str) -> Any:
    (remark,) = against_link(rows, node_link(device), device)
    return remark


def test_a_slow_all_reduce_is_a_share_of_what_nvlink_gives() -> None:
    remark = link([all_reduce(58.0)], A100)
    assert remark.problem and remark.id == "share_of_link"
    assert remark.message.startswith("all_reduce of 1.00 GiB: 58 GB/s is 25% of what NVLink 3 gives on")
    assert "issue 149" in remark.values["source"]


@pytest.mark.parametrize(("rate", "share"), [(225.0, "98%"), (235.0, "100%")])
def test_a_healthy_all_reduce_is_no_problem_and_never_more_than_all(rate: float, share: str) -> None:
    remark = link([all_reduce(10.0, 32 * MiB), all_reduce(rate)], A100)
    assert not remark.problem and share in remark.message


# 482 GB/s of 8 H200 on a link of 450 GB/s, and what NVLS gives to 6 ranks, where the link itself is not exceeded.
@pytest.mark.parametrize("rate", [482.0, 440.0])
def test_more_than_a_ring_can_is_called_in_network_and_has_no_share(rate: float) -> None:
    remark = link([all_reduce(rate)], H200)
    assert remark.id == "in_network" and not remark.problem and "in-network reduction" in remark.message
    assert "%" not in remark.message and "share" not in remark.values


def test_no_share_without_a_link_or_of_small_sizes() -> None:
    assert against_link([all_reduce(58.0)], node_link("a processor"), "a processor") == []
    assert against_link([all_reduce(1.0, 1 * MiB)], node_link(A100), A100) == []


def stored(*rows: Row) -> dict[str, Any]:
    return {"date": "2026-03-04T05:06:07+00:00", "rows": msgspec.to_builtins(list(rows))}


def test_a_regression_names_size_share_and_date() -> None:
    (remark,) = against_baseline([all_reduce(100 / 1.18, 64 * MiB)], stored(all_reduce(100.0, 64 * MiB)))
    assert remark.problem and remark.id == "slower"
    assert remark.message.startswith("all_reduce of 64.0 MiB (in_node) is 18% slower than on 2026-03-04: ")
    (faster,) = against_baseline([all_reduce(150.0)], stored(all_reduce(100.0)))
    assert not faster.problem and "is 50% faster than on 2026-03-04" in faster.message


def test_changes_within_the_spread_or_of_something_else_are_none() -> None:
    before = stored(all_reduce(100.0))
    assert against_baseline([all_reduce(95.0)], before) == []
    assert against_baseline([all_reduce(80.0, spread=0.2)], stored(all_reduce(100.0, spread=0.2))) == []
    assert against_baseline([all_reduce(50.0, ranks=4)], before) == []


def test_wrong_elements_are_a_problem_with_their_size() -> None:
    (remark,) = wrong_results([all_reduce(1.0), all_reduce(1.0, 2 * GiB, wrong=3)])
    assert remark.problem and "all_reduce of 2.00 GiB (in_node) gave 3 wrong elements" in remark.message


def test_a_busy_machine_is_named_and_an_idle_one_is_not() -> None:
    (remark,) = busy(9.5, 2)
    assert "9.5 processes ran or waited on this host's 2 CPUs" in remark.message and not remark.problem
    assert busy(0.9, 2) == []


def test_gloo_is_named_as_what_it_is_and_nccl_is_not() -> None:
    row = make_row(Point("reduce_scatter", 1024, 128), "in_node", 2, 1, "fp32", [[1e-3]], 0)
    assert [r.id for r in about_backend({"backend": "gloo"}, [row])] == ["not_representative", "reduce_scatter_bytes"]
    assert [r.id for r in about_backend({"backend": "gloo"}, [all_reduce(1.0)])] == ["not_representative"]
    assert about_backend({"backend": "nccl"}, [row]) == []

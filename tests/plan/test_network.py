"""Where a group's ranks are, what its ring moves, and collectives of published benchmarks."""

from __future__ import annotations

import msgspec
import pytest

from paceline.cluster.catalogue import device, fabric
from paceline.cluster.measured import Fit, Piece
from paceline.parallel.layout import Layout
from paceline.parallel.strategy import CollectiveKind
from paceline.plan.network import Group, bus_bandwidth, group_of, seconds_of
from paceline.plan.setting import Setting
from paceline.units import GiB, MiB
from tests.plan.settings import gpt, setting


def on(key: str, nodes: int, between: str | None) -> Setting:
    found = device(key)
    layout = Layout(dp_replicate=8 * nodes)
    return setting(
        gpt(), layout, device=found, link=found.link, nodes=nodes, devices_per_node=8,
        fabric=fabric(between) if between else None,
    )  # fmt: skip


def test_ranks_fill_a_node_before_the_next() -> None:
    layout = Layout(pp=2, dp_replicate=4, tp=4)
    assert group_of(layout, ("tp",), 8) == Group(4, 4)
    assert group_of(layout, ("dp_replicate",), 8) == Group(4, 2)
    assert group_of(layout, ("pp",), 8) == Group(2, 1)


def test_a_group_over_two_nodes_has_the_cards_of_its_members_there() -> None:
    cluster = on("a100-sxm-80g", 2, "hdr200")
    card = fabric("hdr200").reached_bytes_per_second
    assert bus_bandwidth("all_reduce", Group(2, 1), cluster) == pytest.approx(card)
    # Eight members of each node share its eight cards; a link between devices may be less than these.
    assert bus_bandwidth("all_reduce", Group(16, 8), cluster) == pytest.approx(8 * card)


def test_switches_sum_but_do_not_gather() -> None:
    node = on("h200-sxm", 1, None)
    link = device("h200-sxm").link
    assert link is not None
    assert bus_bandwidth("all_reduce", Group(8, 8), node) == link.reduces["all_reduce"]
    assert bus_bandwidth("all_gather", Group(8, 8), node) == pytest.approx(link.reached_bytes_per_second)
    assert bus_bandwidth("all_reduce", Group(4, 4), node) == pytest.approx(link.reached_bytes_per_second)


PUBLISHED: list[tuple[str, int, str | None, CollectiveKind, int, int, float]] = [
    # stas00/ml-engineering, network/README.md: all-reduce of 8 A100, seconds.
    ("a100-sxm-80g", 1, None, "all_reduce", 8, 8 * GiB, 64074e-6),
    ("a100-sxm-80g", 1, None, "all_reduce", 8, 128 * MiB, 1327.6e-6),
    # VIA-Research/vTrain, its table of collectives: all-reduce of 4 and 8 A100.
    ("a100-sxm-80g", 1, None, "all_reduce", 4, 1 * GiB, 7259.4e-6),
    ("a100-sxm-80g", 1, None, "all_reduce", 8, 64 * MiB, 579.9e-6),
    # NVIDIA/dgxc-benchmarking: all-reduce of 8 H100 with NVLS.
    ("h100-sxm", 1, None, "all_reduce", 8, 16 * GiB, 62648e-6),
    ("h100-sxm", 1, None, "all_reduce", 8, 64 * MiB, 324.7e-6),
    # stas00/ml-engineering, network/benchmarks: 32 H200 over EFA, 365 GB/s of bus bandwidth at 4 GiB.
    ("h200-sxm", 4, "efa-p5en", "all_reduce", 32, 4 * GiB, 2 * 31 / 32 * 4 * GiB / 364.87e9),
]


@pytest.mark.parametrize(("key", "nodes", "between", "kind", "ranks", "size", "published"), PUBLISHED)
def test_published_collectives_are_met(
    key: str, nodes: int, between: str | None, kind: CollectiveKind, ranks: int, size: int, published: float
) -> None:
    took = seconds_of(kind, size, 1, Group(ranks, min(8, ranks)), on(key, nodes, between))
    # Below a few MiB the protocol decides, which is not modelled; from 64 MiB on within a quarter.
    assert took == pytest.approx(published, rel=0.25)


def test_what_was_measured_of_this_cluster_comes_first() -> None:
    fit = Fit("all_reduce", "in_node", 8, 1, 1e-3, 1e9, 1, GiB, (Piece(0, 1e-3, 1e9),))
    node = msgspec.structs.replace(on("a100-sxm-80g", 1, None), fits=(fit,))
    assert seconds_of("all_reduce", 10_000_000, 1, Group(8, 8), node) == pytest.approx(11e-3)
    # Two ranks move 8/7 x 1/2 of what eight do.
    assert seconds_of("all_reduce", 10_000_000, 1, Group(2, 2), node) == pytest.approx(11e-3 * 8 / 14)
    assert seconds_of("all_gather", 10_000_000, 1, Group(8, 8), node) < 1e-3

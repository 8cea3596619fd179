"""Nodes as sold: every entry is usable, and a cluster can be spelled with one."""

from __future__ import annotations

import pytest

from paceline.cluster.catalogue import device, fabric
from paceline.cluster.nodes import find_node, node_names, node_type
from paceline.cluster.probe import probe_host
from paceline.cluster.spec import parse_cluster
from paceline.errors import UsageError

HERE = probe_host()


@pytest.mark.parametrize("key", node_names())
def test_a_node_names_a_device_and_a_network_of_the_catalogue_and_its_source(key: str) -> None:
    node = node_type(key)
    assert device(node.device).key == node.device
    assert fabric(node.fabric, node.devices).bytes_per_second > 0
    assert node.devices > 0 and node.nics > 0 and node.host_cores > 0 and node.host_memory_bytes > 2**36
    assert len(node.source) > 30 and node.key == key
    if node.watts is not None:
        drawn = device(node.device).watts or 0
        assert node.devices * drawn < node.watts < 3 * node.devices * drawn


@pytest.mark.parametrize("spelled", ["p5.48xlarge", "P5.48XLARGE", "aws-p5.48xlarge"])
def test_a_cluster_of_nodes_as_sold_is_the_cluster_spelled_out(spelled: str) -> None:
    cluster = parse_cluster(f"4x{spelled}", HERE)
    plain = parse_cluster("4x8xh100-sxm:efa-p5", HERE)
    assert (cluster.nodes, cluster.devices_per_node, cluster.device, cluster.fabric) == (
        plain.nodes, plain.devices_per_node, plain.device, plain.fabric,
    )  # fmt: skip
    assert cluster.node == "p5.48xlarge" and plain.node is None


def test_a_clouds_own_name_is_known_and_another_network_may_be_given() -> None:
    assert find_node("Standard_ND96isr_H100_v5") == node_type("nd96isr-h100-v5")
    cluster = parse_cluster("2xdgx-h100:roce400", HERE)
    assert cluster.fabric == fabric("roce400", 8)
    assert parse_cluster("1xgb200-nvl72", HERE).devices == 72


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("4xp5.48xlrge", "p5.48xlarge"),
        ("4xdgx-h10", "dgx-h100"),
        ("0xdgx-h100", "1xdgx-h100"),
        ("4xh100-sxm", "4x8xh100-sxm"),
    ],
)
def test_a_wrong_word_has_the_nearest_right_one(text: str, named: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_cluster(text, HERE)
    assert named in str(caught.value)

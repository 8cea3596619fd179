"""The catalogue of devices and networks: every file is whole, and a name that is not there gets its nearest ones."""

from __future__ import annotations

import pytest

from paceline.cluster.catalogue import EDGE_SECONDS, device, device_names, fabric, fabric_names, node_link
from paceline.cluster.probe import probe_host
from paceline.cluster.spec import parse_cluster
from paceline.errors import UsageError


@pytest.mark.parametrize("key", device_names())
def test_a_device_promises_more_than_it_reaches_and_says_where_each_figure_stands(key: str) -> None:
    found = device(key)
    assert found.curves and all(found.sources)
    for curve in found.curves:
        best = found.peak[curve.dtype]  # type: ignore[index]
        assert list(curve.rates) == sorted(curve.rates) and 0.3 * best < curve.rates[-1] < best
        # A product that would take as long as its edges do reaches half of the best rate.
        small = curve.rates[-1] * EDGE_SECONDS
        assert all(
            rate < curve.rates[-1] / 2 for size, rate in zip(curve.sizes, curve.rates, strict=True) if size < small
        )
    assert 0.5 < found.memory_reached < 1
    if found.link is not None:
        assert 0.3 < found.link.reached <= 1 and found.link.source
        assert all(rate > found.link.reached_bytes_per_second for rate in found.link.reduces.values())


@pytest.mark.parametrize("key", fabric_names())
def test_a_network_reaches_less_than_its_rate(key: str) -> None:
    found = fabric(key)
    assert 0.1 < found.reached < 1 and found.latency_seconds > 0 and found.source


def test_the_newest_devices_of_the_issue_are_there() -> None:
    wanted = {"v100-sxm-32g", "a100-sxm-40g", "a100-sxm-80g", "h100-sxm", "h100-pcie", "h200-sxm", "b200-sxm", "gb200",
              "b300-sxm", "gb300", "l40s", "mi300x", "mi355x", "cpu"}  # fmt: skip
    assert wanted <= set(device_names())


def test_network_cards_of_a_node_are_shared_by_its_devices() -> None:
    assert fabric("ndr400").bytes_per_second == 50e9
    assert fabric("eth100x1", 8).bytes_per_second == pytest.approx(12.5e9 / 8)
    assert fabric("100mbit", 2).bytes_per_second == pytest.approx(12.5e6 / 2)


def test_a_cluster_takes_device_and_fabric_of_the_catalogue() -> None:
    cluster = parse_cluster("2048x8xh100-sxm:ndr400", probe_host())
    assert cluster.device is device("h100-sxm") and cluster.fabric == fabric("ndr400") and cluster.devices == 16384


@pytest.mark.parametrize(("text", "hint"), [("4x8xh100", "h100-sxm"), ("4x8xh100-sxm:ndr40", "ndr400")])
def test_an_unknown_name_gets_its_nearest_ones_and_no_default(text: str, hint: str) -> None:
    with pytest.raises(UsageError, match="in the catalogue") as refused:
        parse_cluster(text, probe_host())
    assert hint in str(refused.value.hint)


def test_a_link_is_that_of_its_device() -> None:
    assert node_link("NVIDIA GB200") == device("gb200").link

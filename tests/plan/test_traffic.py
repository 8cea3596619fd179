"""What a plan says about its collectives: degree, tier, bytes on the wire, seconds where the cluster was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.cluster.measured import MeasuredCluster, save_measured
from paceline.cluster.probe import probe_host
from paceline.job.load import load_job
from paceline.job.resolve import Resolved, resolve_job
from paceline.parallel.layout import Layout
from paceline.plan.traffic import degree, tier, traffic
from tests.cluster.test_measured import COLLECTIVES, FIT


def resolved(*words: str, ranks: int = 4) -> Resolved:
    return resolve_job(load_job(None, list(words)), ranks, probe_host())


def largest_all_reduce(records: list[dict[str, Any]]) -> dict[str, Any]:
    return max((r for r in records if r["kind"] == "all_reduce"), key=lambda r: r["size_bytes"])


@pytest.fixture
def measured(tmp_path: Path) -> MeasuredCluster:
    return save_measured(tmp_path / "cluster.toml", probe_host(), 1, 4, collectives=COLLECTIVES)


def test_degree_and_tier_of_a_group_over_several_axes() -> None:
    layout = Layout(dp_replicate=2, dp_shard=2, tp=2)
    assert [degree(axis, layout) for axis in ("tp", "dp_shard", "dp", "dp+tp")] == [2, 2, 4, 8]
    assert [tier(axis, layout, 4) for axis in ("tp", "dp_shard", "dp_replicate", "dp")] == [
        "in_node", "in_node", "across_nodes", "across_nodes",
    ]  # fmt: skip


def test_a_measured_collective_takes_what_its_fit_says(measured: MeasuredCluster) -> None:
    found = largest_all_reduce(traffic(resolved(), 4, measured))
    each = found["size_bytes"] / found["count"]
    assert found["ranks"] == 4 and found["tier"] == "in_node"
    assert found["seconds"] == pytest.approx(found["count"] * FIT.seconds(each)) and found["seconds_error"] == 0.08
    assert found["sent_bytes"] == pytest.approx(1.5 * found["size_bytes"], abs=1)


def test_fewer_ranks_than_measured_send_less(measured: MeasuredCluster) -> None:
    found = largest_all_reduce(traffic(resolved(ranks=2), 4, measured))
    each = found["size_bytes"] / found["count"]
    assert found["seconds"] == pytest.approx(found["count"] * FIT.seconds(each * 1.0 / 1.5))


def test_what_was_not_measured_has_no_seconds(measured: MeasuredCluster) -> None:
    records = traffic(resolved("parallel.dp_shard=4"), 4, measured)
    assert {r["kind"] for r in records} >= {"all_gather", "reduce_scatter"}
    assert all(r["seconds"] is None for r in records if r["kind"] != "all_reduce")
    assert all(r["seconds"] is None for r in traffic(resolved(), 4, None))
    assert all(r["seconds"] is None for r in traffic(resolved(), 2, measured))


def test_reduce_scatter_over_gloo_is_planned_as_an_all_reduce() -> None:
    (found,) = [r for r in traffic(resolved("parallel.dp_shard=4"), 4, None) if r["kind"] == "reduce_scatter"]
    assert found["sent_bytes"] == pytest.approx(1.5 * found["size_bytes"], abs=1)

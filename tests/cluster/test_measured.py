"""A measured cluster's file: written, read back, extended, refused with a reason."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from paceline.cluster.catalogue import node_link
from paceline.cluster.measured import (
    Collectives,
    Compute,
    Curve,
    Fit,
    MeasuredCluster,
    Piece,
    StorageRates,
    load_measured,
    save_measured,
)
from paceline.cluster.probe import Host, probe_host
from paceline.cluster.spec import parse_cluster
from paceline.errors import UsageError

DATE = "2026-01-02T03:04:05+00:00"
FIT = Fit(
    collective="all_reduce", tier="in_node", ranks=4, nodes=1, latency_seconds=1e-4, bytes_per_second=5e8, min_bytes=1024,
    max_bytes=2**25, pieces=(Piece(0, 1e-4, 1e9), Piece(2**18, 3e-4, 5e8)), relative_error=0.08,
)  # fmt: skip
COLLECTIVES = Collectives(DATE, "paceline bench collectives --procs 4", "gloo", "fp32", (FIT,), torch="2.13")
CURVE = Curve("matmul", "fp32", (256, 512), (1e11, 2e11), (0.01, 0.02))
COMPUTE = Compute(DATE, "paceline bench compute", (CURVE,), 2e10, 5e-6)
STORAGE = StorageRates(DATE, "paceline bench storage", "runs", 2, 1e9, 2e9, 0.01, 0.001, 500.0)


def save(path: Path, host: Host, **parts: object) -> MeasuredCluster:
    return save_measured(path, host, 1, 4, **parts)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path, host = tmp_path / "deep" / "cluster.toml", probe_host()
    written = save(path, host, collectives=COLLECTIVES)
    assert load_measured(path) == written
    assert (written.devices_per_node, written.nodes, written.host) == (4, 1, host)
    found = written.fit("all_reduce", "in_node")
    assert found == FIT and written.fit("all_reduce", "across_nodes") is None
    assert FIT.seconds(1024) == pytest.approx(1e-4 + 1024 / 1e9) and FIT.seconds(2**20) == pytest.approx(
        3e-4 + 2**20 / 5e8
    )
    assert FIT.error_at(2**20) == FIT.error_at(1024) == 0.08


def test_a_later_measurement_replaces_its_own_part_only(tmp_path: Path) -> None:
    path, host = tmp_path / "cluster.toml", probe_host()
    save(path, host, collectives=COLLECTIVES)
    save_measured(path, host, 1, 2, compute=COMPUTE)
    both = save_measured(path, host, 1, 2, storage=STORAGE)
    # How many devices there are is known by those who measured between them.
    assert both.devices_per_node == 4
    assert load_measured(path) == both and (both.collectives, both.compute, both.storage) == (
        COLLECTIVES,
        COMPUTE,
        STORAGE,
    )
    assert [line.split(" measured")[0] for line in both.dates()] == ["collectives", "compute", "storage"]
    other = msgspec.structs.replace(host, name="another-host")
    assert save(path, other, compute=COMPUTE).collectives is None


def test_plan_takes_the_file_and_here_takes_the_one_of_this_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = probe_host()
    save(tmp_path / "cluster.toml", host, collectives=COLLECTIVES)
    given = parse_cluster(str(tmp_path / "cluster.toml"), host)
    assert given.devices == 4 and given.measured is not None and given.measured.collectives == COLLECTIVES
    assert parse_cluster("here", host).measured is None
    monkeypatch.chdir(tmp_path)
    found = parse_cluster("here", host).measured
    assert found is not None and found.collectives == COLLECTIVES
    assert parse_cluster("here", msgspec.structs.replace(host, name="another-host")).measured is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "cannot read"),
        ('schema = "paceline.cluster/1"\n[host', "cut short"),
        ('schema = "paceline.cluster/2"\nnodes = 1\n', "this version reads 'paceline.cluster/1'"),
        ("nodes = 1\n", "has the schema None"),
        ('schema = "paceline.cluster/1"\nnodes = "one"\n', "no measured cluster"),
    ],
)
def test_an_unusable_file_is_refused_with_its_reason(tmp_path: Path, text: str | None, reason: str) -> None:
    path = tmp_path / "c.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=reason) as refused:
        parse_cluster(str(path), probe_host())
    assert str(path) in refused.value.message


def test_a_device_s_link_is_found_by_the_name_that_nvidia_smi_gives() -> None:
    a100 = node_link("NVIDIA A100-SXM4-80GB")
    assert a100 is not None and (a100.bytes_per_second, a100.reached_bytes_per_second) == (300e9, pytest.approx(230e9))
    assert node_link("NVIDIA H200") is not None and node_link("an unknown device") is None

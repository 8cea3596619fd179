"""Over what NCCL sends, from its log; a fast fabric that was not used is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.bench.rows import GB, make_row
from paceline.bench.sweep import Point
from paceline.bench.transport import Transport, about_transport, log_to_file, read_log, transport_of
from paceline.cluster.ports import RdmaPort, rdma_ports
from paceline.units import GiB

# Lines as NCCL 2.20 to 2.27 log them.
SOCKET_LOG = """\
node-a:4242:4242 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.5<0>
node-a:4242:4270 [0] NCCL INFO NET/IB : No device found.
node-a:4242:4270 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.5<0>
node-a:4242:4270 [0] NCCL INFO Using network Socket
node-a:4242:4270 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
node-a:4242:4270 [0] NCCL INFO Channel 00/0 : 7[7] -> 8[0] [receive] via NET/Socket/0
node-a:4242:4270 [0] NCCL INFO Channel 01/0 : 7[7] -> 8[0] [receive] via NET/Socket/0
"""
IB_LOG = """\
node-a:77:90 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB ib0:10.1.0.5<0>
node-a:77:90 [0] NCCL INFO Using network IB
node-a:77:90 [0] NCCL INFO Channel 00/0 : 7[7] -> 8[0] [receive] via NET/IB/0/GDRDMA
"""
PORT = RdmaPort("mlx5_0", 1, True, 50e9, "InfiniBand")


def rows(bus_bandwidth: float) -> list[object]:
    seconds = 2 * 15 / 16 * GiB / (bus_bandwidth * GB)
    return [make_row(Point("all_reduce", GiB, GiB // 4), "across_nodes", 16, 2, "fp32", [[seconds]], 0)]


def test_network_and_channels_are_read_from_the_log() -> None:
    assert transport_of(SOCKET_LOG) == Transport("Socket", {"P2P": 1, "NET/Socket": 2})
    assert transport_of(IB_LOG) == Transport("IB", {"NET/IB": 1})
    assert transport_of("nothing of the kind") == Transport(None, {})


# BL-73
def test_sockets_beside_an_active_port_are_flagged() -> None:
    (remark,) = about_transport(transport_of(SOCKET_LOG), [PORT], rows(1.1))  # type: ignore[arg-type]
    assert remark.problem and remark.id == "slow_transport"
    assert "over IP sockets, and mlx5_0:1 (InfiniBand, 50 GB/s) is active" in remark.message


# BL-73
@pytest.mark.parametrize(("rate", "problem", "share"), [(46.0, False, "92%"), (12.0, True, "24%")])
def test_the_rate_between_nodes_is_a_share_of_the_ports(rate: float, problem: bool, share: str) -> None:
    used, found = about_transport(transport_of(IB_LOG), [PORT], rows(rate))  # type: ignore[arg-type]
    assert used.message == "NCCL sends between nodes over IB" and not used.problem
    assert found.problem == problem and f"is {share} of the 50 GB/s of this node's 1 active port" in found.message


# BL-73
def test_sockets_where_nothing_faster_is_active_are_no_problem() -> None:
    down = RdmaPort("mlx5_0", 1, False, 50e9, "InfiniBand")
    (remark,) = about_transport(transport_of(SOCKET_LOG), [down], rows(1.1))  # type: ignore[arg-type]
    assert not remark.problem and remark.values["network"] == "Socket"
    assert about_transport(None, [PORT], rows(1.1)) == []  # type: ignore[arg-type]
    assert about_transport(transport_of(SOCKET_LOG), [PORT], []) == []


def test_ports_are_read_from_the_kernel_s_files(tmp_path: Path) -> None:
    for device, state, rate in (
        ("mlx5_0", "4: ACTIVE", "400 Gb/sec (4X NDR)"),
        ("mlx5_1", "1: DOWN", "10 Gb/sec (4X SDR)"),
    ):
        folder = tmp_path / device / "ports" / "1"
        folder.mkdir(parents=True)
        (folder / "state").write_text(f"{state}\n")
        (folder / "rate").write_text(f"{rate}\n")
        (folder / "link_layer").write_text("InfiniBand\n")
    found = rdma_ports(tmp_path)
    assert [(p.name, p.active, p.bytes_per_second) for p in found] == [
        ("mlx5_0:1", True, 50e9),
        ("mlx5_1:1", False, 1.25e9),
    ]
    assert rdma_ports(tmp_path / "none") == []


def test_nccl_logs_into_a_file_unless_the_user_has_it_log(tmp_path: Path) -> None:
    mine = {"NCCL_DEBUG": "WARN"}
    assert log_to_file(mine) is None and mine == {"NCCL_DEBUG": "WARN"}
    env: dict[str, str] = {}
    path = log_to_file(env)
    assert path is not None and env["NCCL_DEBUG_FILE"] == str(path)
    path.write_text(IB_LOG)
    assert read_log(path) == transport_of(IB_LOG) and not path.exists() and read_log(path) is None

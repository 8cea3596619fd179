"""Healthy machines of several kinds as snapshots, and how to make one of them sick."""

from __future__ import annotations

from typing import Any

import msgspec

from paceline.doctor.host import (
    Clock,
    Cpu,
    Folder,
    Gid,
    Gpu,
    Host,
    Interface,
    Limit,
    Memory,
    Names,
    NvLink,
    RdmaPort,
)
from paceline.units import GiB, MiB, TiB

ROCE_GIDS = (
    Gid(0, "fe80:0000:0000:0000:0e42:a1ff:fe00:0001", "IB/RoCE v1", "ens1"),
    Gid(1, "fe80:0000:0000:0000:0e42:a1ff:fe00:0001", "RoCE v2", "ens1"),
    Gid(2, "0000:0000:0000:0000:0000:ffff:0a00:0001", "IB/RoCE v1", "ens1"),
    Gid(3, "0000:0000:0000:0000:0000:ffff:0a00:0001", "RoCE v2", "ens1"),
)
VERSIONS = {
    "python": "3.11.9",
    "kernel": "6.8.0",
    "paceline": "0.1.0",
    "torch": "2.13.0",
    "numpy": "2.1.0",
    "msgspec": "0.19.0",
}
LOOPBACK = Interface(name="lo", kind="loopback", mtu=65536, addresses=("127.0.0.1", "::1"))
DOCKER = Interface(name="docker0", kind="bridge", addresses=("172.17.0.1",))


def cpu_host(name: str = "cpu1", cpus: int = 8) -> Host:
    """A machine without devices, as a laptop or a container is."""
    return Host(
        name=name,
        cpu=_cpu(cpus, 1),
        memory=Memory(total=32 * GiB, available=28 * GiB),
        limits=limits(),
        folders=folders(shm=16 * GiB),
        interfaces=(LOOPBACK, Interface(name="eth0", speed=10e9, addresses=("10.0.0.1",), receive_packets=10**6)),
        names=Names(host=name, qualified=name, addresses=("10.0.0.1",), seconds=0.001),
        clock=Clock(synchronised=True, error=0.001),
        versions=VERSIONS,
    )


def a100_host(name: str = "a100-1") -> Host:
    """8 A100 with 12 NVLinks each, 8 HDR InfiniBand cards and a slow one for storage on Ethernet."""
    return _gpu_host(
        name, "NVIDIA A100-SXM4-80GB", 80 * GiB, NvLink(12, 12, 25e9), 400.0, 1410.0, _infiniband(8, 200e9)
    )


def h100_host(name: str = "h100-1") -> Host:
    """8 H100 with 18 NVLinks each and 8 NDR InfiniBand cards."""
    return _gpu_host(
        name, "NVIDIA H100 80GB HBM3", 80 * GiB, NvLink(18, 18, 26.562e9), 700.0, 1980.0, _infiniband(8, 400e9)
    )


def roce_host(name: str = "roce-1") -> Host:
    """8 H100 and 8 cards of RoCE, each with an interface of jumbo frames."""
    ports = tuple(
        RdmaPort(
            device=f"mlx5_{n}",
            link="Ethernet",
            rate=400e9,
            rate_max=400e9,
            driver="mlx5_core",
            interface=f"ens{n}",
            gids=ROCE_GIDS,
        )
        for n in range(8)
    )
    host = _gpu_host(name, "NVIDIA H100 80GB HBM3", 80 * GiB, NvLink(18, 18, 26.562e9), 700.0, 1980.0, ports)
    cards = tuple(
        Interface(name=f"ens{n}", mtu=9000, speed=400e9, addresses=(f"10.1.{n}.1",), receive_packets=10**9)
        for n in range(8)
    )
    eth0 = Interface(name="eth0", mtu=9000, speed=25e9, addresses=("10.0.0.1",))
    return change(host, interfaces=(LOOPBACK, DOCKER, eth0, *cards))


def efa_host(name: str = "efa-1") -> Host:
    """8 H100 of a cloud with 32 EFA devices, in a virtual machine, under libfabric's plugin."""
    ports = tuple(
        RdmaPort(device=f"rdmap{n}s0", link="Unspecified", rate=100e9, rate_max=100e9, driver="efa", node=n // 16)
        for n in range(32)
    )
    host = _gpu_host(name, "NVIDIA H100 80GB HBM3", 80 * GiB, NvLink(18, 18, 26.562e9), 700.0, 1980.0, ports)
    return change(
        host,
        virtual=True,
        peer_memory=False,
        transports=("AWS",),
        environment={"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "NCCL_SOCKET_IFNAME": "^docker,lo"},
        interfaces=(LOOPBACK, DOCKER, Interface(name="ens32", mtu=9001, speed=100e9, addresses=("10.0.0.1",))),
    )


def mi300_host(name: str = "mi300-1") -> Host:
    """8 MI300X with 8 RoCE cards."""
    host = roce_host(name)
    gpus = tuple(
        Gpu(
            index=n,
            name="AMD Instinct MI300X",
            uuid=f"{n:016x}",
            vendor="amd",
            bus=f"0000:{n:02x}:00.0",
            memory=192 * GiB,
            memory_used=300 * MiB,
            pcie_width=16,
            pcie_width_max=16,
            node=n // 4,
            cpus=_node_cpus(n // 4),
        )
        for n in range(8)
    )
    return change(
        host,
        gpus=gpus,
        topology={},
        environment={"HSA_NO_SCRATCH_RECLAIM": "1", "NCCL_IB_HCA": "=mlx5_0,mlx5_1"},
        versions={**VERSIONS, "driver": "6.10.5"},
        missing={"peer_memory": "there is no NVIDIA driver"},
        peer_memory=None,
    )


def healthy_hosts() -> dict[str, Host]:
    """One of each kind."""
    makers = (cpu_host, a100_host, h100_host, roce_host, efa_host, mi300_host)
    return {maker.__name__.removesuffix("_host"): maker() for maker in makers}


def change(host: Host, **parts: Any) -> Host:
    """The same host with other parts."""
    return msgspec.structs.replace(host, **parts)


def with_variables(host: Host, **variables: str) -> Host:
    return change(host, environment={**host.environment, **variables})


def with_gpu(host: Host, index: int, **fields: Any) -> Host:
    """One GPU changed."""
    gpus = tuple(msgspec.structs.replace(g, **fields) if g.index == index else g for g in host.gpus)
    return change(host, gpus=gpus)


def with_port(host: Host, number: int, **fields: Any) -> Host:
    """One RDMA port changed."""
    ports = tuple(msgspec.structs.replace(p, **fields) if n == number else p for n, p in enumerate(host.rdma))
    return change(host, rdma=ports)


def with_folder(host: Host, role: str, **fields: Any) -> Host:
    """One directory changed, or added."""
    if host.folder(role) is None:
        base = Folder(role=role, path=f"/{role}", kind="ext4", size=TiB, free=TiB // 2, inodes=10**8, inodes_free=10**7)
        host = change(host, folders=(*host.folders, base))
    found = tuple(msgspec.structs.replace(f, **fields) if f.role == role else f for f in host.folders)
    return change(host, folders=found)


def with_interface(host: Host, name: str, **fields: Any) -> Host:
    """One interface changed."""
    found = tuple(msgspec.structs.replace(i, **fields) if i.name == name else i for i in host.interfaces)
    return change(host, interfaces=found)


def limits(**soft: int) -> dict[str, Limit]:
    usual = {"nofile": 65536, "nproc": 200_000, "memlock": -1, "core": 0, "stack": 8 * MiB}
    return {name: Limit(value, value) for name, value in {**usual, **soft}.items()}


def folders(shm: int) -> tuple[Folder, ...]:
    """Directories of every job: a roomy disk, and /dev/shm of `shm` bytes."""
    return (
        Folder(role="shm", path="/dev/shm", kind="tmpfs", size=shm, free=shm, inodes=10**6, inodes_free=10**6),
        Folder(role="tmp", path="/tmp", kind="ext4", size=TiB, free=TiB // 2, inodes=10**8, inodes_free=10**7),
        Folder(role="run", path="/data/work", kind="nfs4", size=10 * TiB, free=5 * TiB),
    )


def _cpu(cpus: int, nodes: int) -> Cpu:
    share = cpus // nodes
    return Cpu(
        model="Xeon",
        online=tuple(range(cpus)),
        allowed=tuple(range(cpus)),
        threads_per_core=2,
        bf16=True,
        load=0.3,
        busy=0.02,
        nodes={str(n): tuple(range(n * share, (n + 1) * share)) for n in range(nodes)},
        governor="performance (intel_pstate)",
    )


def _node_cpus(node: int) -> tuple[int, ...]:
    return tuple(range(node * 64, (node + 1) * 64))


def _infiniband(count: int, rate: float) -> tuple[RdmaPort, ...]:
    return tuple(
        RdmaPort(device=f"mlx5_{n}", rate=rate, rate_max=rate, driver="mlx5_core", interface=f"ib{n}")
        for n in range(count)
    )


def _gpu_host(
    name: str,
    model: str,
    memory: int,
    link: NvLink,
    watts: float,
    clock: float,
    ports: tuple[RdmaPort, ...],
    base: float | None = None,
) -> Host:
    gpus = tuple(
        Gpu(
            index=n,
            name=model,
            uuid=f"GPU-{name}-{n}",
            bus=f"0000:{0x10 + n:02x}:00.0",
            memory=memory,
            memory_used=500 * MiB,
            clock=clock - 15,
            clock_max=clock,
            clock_set=base or clock,
            clock_default=base or clock,
            utilisation=0.0,
            temperature=34.0,
            temperature_slow=89.0,
            power_limit=watts,
            power_default=watts,
            persistence=True,
            ecc=True,
            pcie_generation=1,
            pcie_generation_max=5,
            pcie_width=16,
            pcie_width_max=16,
            nvlink=link,
            fabric="Completed",
            node=n // 4,
            cpus=_node_cpus(n // 4),
        )
        for n in range(8)
    )
    topology = {
        f"GPU{n}": {
            **{f"GPU{m}": f"NV{link.links}" for m in range(8) if m != n},
            **{f"NIC{m}": "PIX" if m == n else "SYS" for m in range(8)},
        }
        for n in range(8)
    }
    return Host(
        name=name,
        cpu=_cpu(128, 2),
        memory=Memory(total=2 * TiB, available=TiB),
        limits=limits(),
        folders=folders(shm=512 * GiB),
        interfaces=(LOOPBACK, DOCKER, Interface(name="eth0", mtu=9000, speed=25e9, addresses=("10.0.0.1",))),
        rdma=ports,
        names=Names(host=name, qualified=name, addresses=("10.0.0.1",), seconds=0.002),
        clock=Clock(synchronised=True, error=0.0001),
        versions={**VERSIONS, "driver": "570.86.15", "nccl": "2.29.3", "cuda": "12.8"},
        gpus=gpus,
        gpu_devices=8,
        topology=topology,
        peer_memory=True,
        transports=("IB",),
        bridges_checked={"0000:00:01.0": False},
    )

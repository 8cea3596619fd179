"""For each check, hosts and jobs that it must catch, with words that its finding must hold."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from paceline.doctor.check import Given
from paceline.doctor.host import Clock, Host, Interface, NvLink, Peer, Place, Port, Process, Xid
from paceline.doctor.job_facts import JobFacts
from paceline.units import GiB, MiB
from tests.doctor.hosts import (
    LOOPBACK,
    ROCE_GIDS,
    VERSIONS,
    a100_host,
    change,
    cpu_host,
    efa_host,
    h100_host,
    limits,
    mi300_host,
    roce_host,
    with_folder,
    with_gpu,
    with_interface,
    with_port,
    with_variables,
)


class Sick(NamedTuple):
    """What is given, and what the finding must say."""

    given: Given
    says: tuple[str, ...]


def one(host: Host, *says: str, job: JobFacts | None = None) -> Sick:
    return Sick(Given(hosts=(host,), job=job), says)


def two(first: Host, second: Host, *says: str, job: JobFacts | None = None) -> Sick:
    return Sick(Given(hosts=(first, second), job=job), says)


def job(**fields: Any) -> JobFacts:
    """A healthy job of 100M parameters on 8 ranks of GPUs."""
    usual = {
        "name": "job",
        "world_size": 8,
        "local_ranks": 8,
        "global_batch": 256,
        "data_ranks": 8,
        "microbatch": 8,
        "accumulation": 4,
        "tokens_per_step": 256 * 1024,
        "lr": 6e-4,
        "warmup_steps": 100,
        "steps": 10_000,
        "parameters": 10**8,
        "loader_workers": 2,
        "shared_memory": 64 * MiB,
        "memory": 20 * GiB,
        "memory_available": 80 * GiB,
        "on_cpu": False,
        "checkpoint": 1200 * MiB,
        "checkpoint_place": "/checkpoint",
        "keep": 3,
        "grace": 30.0,
        "grace_source": "torchrun's default",
        "saved": 4.0,
    }
    return JobFacts(**{**usual, **fields})


def small_job(**fields: Any) -> JobFacts:
    """The same on two ranks of a processor."""
    return job(
        **{
            "world_size": 2,
            "local_ranks": 2,
            "data_ranks": 2,
            "on_cpu": True,
            "memory": GiB,
            "memory_available": 16 * GiB,
            **fields,
        }
    )


def with_cpu(host: Host, **fields: Any) -> Host:
    assert host.cpu is not None
    return change(host, cpu=msgspec.structs.replace(host.cpu, **fields))


def with_memory(host: Host, **fields: Any) -> Host:
    assert host.memory is not None
    return change(host, memory=msgspec.structs.replace(host.memory, **fields))


def with_names(host: Host, **fields: Any) -> Host:
    assert host.names is not None
    return change(host, names=msgspec.structs.replace(host.names, **fields))


def clocked(host: Host, rank: int, offset: float) -> Host:
    place = Place(rank=rank, world_size=2, local_world_size=1)
    return change(host, place=place, clock=Clock(synchronised=True, offset=offset))


def sick() -> dict[str, list[Sick]]:
    """By the id of the check."""
    return {**_variables(), **_network(), **_gpus(), **_machine(), **_folders(), **_job(), **_differences()}


def _variables() -> dict[str, list[Sick]]:
    cpu = cpu_host()
    return {
        "variables": [
            one(with_variables(cpu, NCCL_IB_DISABLE="1"), "NCCL_IB_DISABLE=1"),
            one(
                with_variables(roce_host(), NCCL_IB_DISABLE="1"),
                "8 active RoCE ports of 50.0 GB/s each go unused",
                "IP goes at 3.12 GB/s",
            ),
            one(with_variables(h100_host(), NCCL_P2P_DISABLE="1"), "8 GPUs here have 18 NVLinks each"),
            one(with_variables(efa_host(), FI_PROVIDER="tcp"), "FI_PROVIDER=tcp"),
            one(with_variables(mi300_host(), HSA_NO_SCRATCH_RECLAIM="0"), "HSA_NO_SCRATCH_RECLAIM=0"),
        ],
        "threads": [
            one(with_variables(cpu, OMP_NUM_THREADS="64"), "OMP_NUM_THREADS=64: 2 ranks x 64 threads on 8 CPUs"),
            one(with_variables(h100_host(), MKL_NUM_THREADS="128"), "8 ranks x 128 threads on 128 CPUs"),
            one(with_variables(cpu, OMP_NUM_THREADS="4", MKL_NUM_THREADS="1"), "torch takes 1"),
            one(with_variables(cpu, OMP_NUM_THREADS="1"), "2 ranks on 8 CPUs compute with 2 of them"),
        ],
        "variables-unknown": [
            one(with_variables(cpu, NCCL_SOCKET_IFNAMES="eth0"), "NCCL_SOCKET_IFNAMES=eth0: nothing reads this name"),
            one(with_variables(cpu, PYTORCH_CUDA_ALLOC_CONFIG="x"), "PYTORCH_CUDA_ALLOC_CONF is one"),
        ],
        "timeouts": [
            one(with_variables(h100_host(), NCCL_IB_TIMEOUT="25"), "16m 02s", "10m 00s"),
            one(
                with_variables(h100_host(), TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC="120"),
                "longest save took 5m 00s",
                job=job(saved=300.0),
            ),
        ],
    }


def _network() -> dict[str, list[Sick]]:
    cpu, roce = cpu_host(), roce_host()
    other = cpu_host("cpu2")
    only_lo = change(cpu, interfaces=(LOOPBACK, Interface(name="docker0", kind="bridge")))
    mixed = change(a100_host(), rdma=(*a100_host().rdma, msgspec.structs.replace(roce.rdma[0], device="mlx5_8")))
    many = change(roce, rdma=tuple(msgspec.structs.replace(roce.rdma[0], device=f"mlx5_{n}") for n in range(12)))
    return {
        "interface-named": [
            # BL-72
            one(with_variables(cpu, NCCL_SOCKET_IFNAME="nope0"), "names no interface of this host, which has lo, eth0"),
            one(with_variables(cpu, GLOO_SOCKET_IFNAME="nope0"), "names no interface of this host"),
            two(with_variables(cpu, NCCL_SOCKET_IFNAME="lo"), other, "leaves only lo, the loopback"),
            two(with_variables(only_lo, NCCL_SOCKET_IFNAME="^docker0"), other, "leaves only lo, the loopback"),
            two(with_variables(a100_host(), NCCL_SOCKET_IFNAME="docker0"), other, "a bridge of this host"),
            one(
                with_interface(with_variables(cpu, NCCL_SOCKET_IFNAME="=eth0"), "eth0", up=False), "eth0, which is down"
            ),
            one(with_interface(with_variables(cpu, NCCL_SOCKET_IFNAME="eth"), "eth0", addresses=()), "no address"),
        ],
        "interface-errors": [one(with_interface(cpu, "eth0", receive_errors=500), "500 damaged", "of 1000000 packets")],
        "mtu-small": [one(with_interface(roce, "ens0", mtu=1500), "ens0 under mlx5_0 has MTU 1500")],
        "rdma-ports": [
            one(with_port(a100_host(), 3, active=False, state="DOWN"), "mlx5_3 port 1 is DOWN; 7 of 8"),
            one(with_port(a100_host(), 3, rate=100e9), "mlx5_3 port 1 runs at 12.5 GB/s, others here at 25.0 GB/s"),
            one(with_port(a100_host(), 0, counters={"symbol_error": 5000}), "symbol_error 5000"),
        ],
        "rdma-named": [
            one(with_variables(a100_host(), NCCL_IB_HCA="=mlx9_0"), "selects no active RDMA device"),
            one(with_variables(many, NCCL_IB_HCA="mlx5_1"), "takes mlx5_10, mlx5_11 too"),
            one(with_variables(mixed, NCCL_IB_HCA="mlx5"), "mixes InfiniBand with Ethernet ports (mlx5_8)"),
        ],
        "gids": [
            one(with_port(roce, 0, gids=ROCE_GIDS[:2]), "mlx5_0 port 1 has no RoCE v2 GID with an IPv4 address"),
            one(with_variables(roce, NCCL_IB_GID_INDEX="7"), "mlx5_0 has no GID at that index"),
            one(with_variables(roce, NCCL_IB_GID_INDEX="2"), "IB/RoCE v1"),
        ],
        "rdma-memlock": [one(change(h100_host(), limits=limits(memlock=8 * MiB)), "8.00 MiB")],
        # BL-73
        "transport-used": [
            one(
                change(a100_host(), transports=("Socket",)), "Using network Socket, and 8 RDMA ports of 25.0 GB/s each"
            ),
            one(with_variables(change(a100_host(), transports=("IBext_v8",)), NCCL_IB_DISABLE="1"), "it uses IBext_v8"),
        ],
        "peer-memory": [one(change(h100_host(), peer_memory=False), "8 GPUs and 8 RDMA ports")],
        "pci-access": [one(change(h100_host(), bridges_checked={"0000:00:01.0": True}), "0000:00:01.0")],
        "names": [
            # BL-71
            two(with_names(cpu, addresses=("127.0.1.1",)), other, "resolves to 127.0.1.1: the loopback"),
            two(with_names(cpu, addresses=()), other, "resolves to nothing"),
            one(with_names(cpu, seconds=3.0), "took 3.0 s"),
        ],
        "peers": [
            # BL-71
            one(
                change(cpu, peers=(Peer(name="cpu2", reason="Name or service not known"),)), "cpu1 cannot resolve cpu2"
            ),
            one(
                change(
                    cpu, peers=(Peer(name="cpu2", port=29500, address="10.0.0.2", reachable=False, reason="timed out"),)
                ),
                "cpu1 does not reach cpu2 at 10.0.0.2 port 29500: timed out",
            ),
        ],
        "port-free": [
            one(change(cpu, port=Port(number=29500, free=False, holder="process 77")), "in use, by process 77"),
            one(change(cpu, port=Port(number=40000, free=True)), "range 32768 to 60999"),
        ],
        "clock-kept": [two(change(cpu, clock=Clock(synchronised=False)), other, "nothing keeps its clock in step")],
    }


def _gpus() -> dict[str, list[Sick]]:
    host = h100_host()
    cut = {**host.topology, "GPU0": {**host.topology["GPU0"], "GPU7": "SYS"}}
    far = {**host.topology, "GPU3": {n: "SYS" if n.startswith("NIC") else p for n, p in host.topology["GPU3"].items()}}
    held = Process(pid=4242, gpu=host.gpus[2].uuid, name="python train.py", memory=40 * GiB, age=90_000.0, orphan=True)
    return {
        "gpu-driver": [
            one(change(host, gpus=host.gpus[:7]), "shows 8 GPUs, the driver answers for 7"),
            one(
                change(host, gpus=(), missing={"gpus": "nvidia-smi did not answer within 8 s"}),
                "did not answer within 8 s",
            ),
        ],
        "gpu-xid": [
            one(
                change(host, xids=(Xid(79, "0000:12:00", "GPU has fallen off the bus."),)),
                "Xid 79",
                "GPU 2 (GPU-h100-1-2)",
            ),
            one(change(host, xids=(Xid(63, "0000:10:00"), Xid(63, "0000:10:00"))), "Xid 63", "2 times"),
        ],
        "gpu-memory-errors": [
            one(with_gpu(host, 1, uncorrected=3), "GPU 1", "3 uncorrected memory errors"),
            one(with_gpu(host, 1, remap_pending=True), "waits to be remapped"),
            one(with_gpu(host, 1, remap_failed=True), "could not be remapped"),
            one(with_gpu(host, 1, corrected=50_000), "50000 corrected"),
            one(with_gpu(host, 1, ecc=False), "error correction is off"),
        ],
        "gpu-throttled": [
            one(
                with_gpu(host, 5, throttle=("thermal, hardware",), temperature=91.0, clock=900.0),
                "GPU 5",
                "900 of 1980 MHz, 91 C",
            ),
            one(with_gpu(host, 5, throttle=("power brake",)), "power brake"),
            one(with_gpu(host, 5, clock_set=1200.0), "application clock 1200 MHz, its default is 1980 MHz"),
            one(with_gpu(host, 5, power_limit=350.0), "power limit 350 W, its default is 700 W"),
        ],
        "gpu-links": [
            one(with_gpu(host, 4, nvlink=NvLink(18, 16, 26.562e9)), "GPU 4", "16 of 18 NVLinks"),
            one(with_gpu(host, 4, nvlink=None), "0 of 18 NVLinks"),
            one(with_gpu(host, 4, fabric="In Progress"), "GPU 4", "the NVSwitch fabric is In Progress"),
            one(with_gpu(host, 4, pcie_width=8), "PCIe x8, it can x16"),
            one(with_gpu(host, 4, pcie_generation=3, utilisation=90.0), "generation 3 under load, it can 5"),
        ],
        "gpu-topology": [
            one(change(host, topology=cut), "GPU0-GPU7 (SYS) without NVLink, 27 other pairs have NV18"),
            one(change(host, topology=far), "GPU3 have no network card on their own PCI switch"),
        ],
        "gpu-processes": [
            one(change(host, processes=(held,)), "process 4242", "its parent is gone", "40.0 GiB of GPU 2"),
            one(with_gpu(host, 2, memory_used=30 * GiB), "GPU 2: 30.0 GiB are in use and no process here holds them"),
        ],
        "gpu-mode": [
            one(with_gpu(host, 0, compute_mode="Prohibited"), "Prohibited"),
            one(with_gpu(host, 0, mig=True), "split into instances"),
            one(with_gpu(host, 0, persistence=False), "persistence mode is off on GPU 0"),
            one(with_gpu(host, 0, compute_mode="Exclusive_Process"), "16 ranks on 8 GPUs", job=job(local_ranks=16)),
        ],
        "gpu-alike": [one(with_gpu(host, 7, name="NVIDIA A100-SXM4-80GB"), "7 x NVIDIA H100", "1 x NVIDIA A100")],
        "gpu-visible": [
            one(with_variables(host, CUDA_VISIBLE_DEVICES="0,1,9"), "names GPU 9 and there are 8"),
            one(with_variables(host, CUDA_VISIBLE_DEVICES="0,0"), "names 0 twice"),
            one(with_variables(host, CUDA_VISIBLE_DEVICES=""), "hides all 8"),
            one(with_variables(host, CUDA_VISIBLE_DEVICES="0,1,2,3"), "8 ranks on 4 visible GPUs"),
        ],
        "cpu-near": [one(with_cpu(host, allowed=tuple(range(64))), "GPU 4, 5, 6, 7", "may use CPUs 0-63")],
        "numa-balancing": [one(with_memory(mi300_host(), numa_balancing=True), "over 2 nodes")],
    }


def _machine() -> dict[str, list[Sick]]:
    cpu, gpu = cpu_host(), h100_host()
    return {
        "cores": [
            one(with_cpu(cpu, allowed=(0,)), "2 ranks on 1 CPUs (of 8", job=small_job()),
            one(with_cpu(gpu, allowed=(0, 1, 64, 65, 66, 67, 68, 69)), "8 CPUs (of 128", "1.0 a rank"),
        ],
        "cpu-quota": [one(with_cpu(cpu, quota=1.5), "grants 1.5 CPUs' worth of time, to 2 ranks", job=small_job())],
        "cpu-governor": [one(with_cpu(cpu, governor="powersave (acpi-cpufreq)"), "powersave")],
        "cpu-busy": [one(with_cpu(cpu, load=20.0, busy=0.97), "20.0 processes wanted one of 8 CPUs", "97%")],
        "memory-room": [
            one(with_memory(cpu, available=GiB), "1.00 GiB of 32.0 GiB are available; 2 ranks need 2.00 GiB"),
            one(with_memory(cpu, limit=4 * GiB, limit_used=3 * GiB), "the control group's limit is 4.00 GiB"),
            one(with_memory(cpu, oom_kills=2), "killed 2 processes"),
            one(cpu, "2 ranks need 40.0 GiB", job=small_job(memory=20 * GiB, memory_available=24 * GiB)),
        ],
        "limits": [
            one(change(cpu, limits=limits(nofile=256)), "the limit on open files is 256"),
            one(change(cpu, limits=limits(nproc=64)), "processes and threads is 64"),
        ],
        "library-versions": [
            one(change(cpu, versions={**VERSIONS, "torch": "2.4.1+cpu"}), "torch 2.4.1+cpu"),
            one(change(gpu, versions={**gpu.versions, "driver": "470.57"}), "driver 470.57 under CUDA 12.8"),
            one(change(gpu, versions={**gpu.versions, "nccl": "2.27.5"}), "NCCL 2.27.5"),
        ],
    }


def _folders() -> dict[str, list[Sick]]:
    cpu, gpu = cpu_host(), h100_host()
    return {
        "shared-memory": [
            # BL-30
            one(
                with_folder(cpu, "shm", size=64 * MiB, free=64 * MiB),
                "64.0 MiB free of 64.0 MiB; 2 ranks need 256 MiB",
                job=small_job(shared_memory=128 * MiB),
            ),
            one(with_folder(gpu, "shm", size=64 * MiB, free=64 * MiB), "8 ranks need 256 MiB"),
            one(change(cpu, folders=cpu.folders[1:]), "/dev/shm is not mounted"),
        ],
        "folder-space": [
            one(with_folder(cpu, "tmp", free=100 * MiB), "/tmp (tmp) has 100 MiB of 1.00 TiB free"),
            one(
                with_folder(cpu, "checkpoint", free=2 * GiB),
                "3 checkpoints and the one being written are 4.69 GiB",
                job=small_job(),
            ),
            one(with_folder(cpu, "tmp", inodes_free=3), "3 of 100000000 inodes left"),
        ],
        "folder-writable": [
            one(with_folder(cpu, "checkpoint", read_only=True), "mounted read-only"),
            one(with_folder(cpu, "run", writable=False), "cannot be written"),
        ],
        "file-system": [
            one(with_folder(cpu, "checkpoint", kind="tmpfs"), "memory of this host"),
            one(with_folder(cpu, "tmp", kind="nfs4"), "temporary files go to /tmp, which is nfs4"),
            one(with_folder(cpu, "checkpoint", kind="fuse.gcsfuse"), "a bucket shown as files"),
            two(
                with_folder(cpu, "checkpoint", kind="overlay"),
                cpu_host("cpu2"),
                "a layer of this container",
                job=small_job(),
            ),
        ],
    }


def _job() -> dict[str, list[Sick]]:
    cpu, gpu = cpu_host(), h100_host()
    slow = with_folder(cpu, "checkpoint", write_rate=20 * MiB)
    broken = JobFacts(
        name="job", problem="10 sequences do not divide over 3 data ranks", key="batch.global_batch", hint="Take 12."
    )
    return {
        "job-runs": [
            one(cpu, "batch.global_batch: 10 sequences do not divide over 3 data ranks", job=broken),
            one(gpu, "needs 100 GiB, its device has 80.0 GiB", job=job(memory=100 * GiB)),
        ],
        "job-batch": [
            one(gpu, "micro-batch 1 x 128 accumulated", job=job(microbatch=1, accumulation=128, global_batch=1024)),
            one(gpu, "256 tokens a rank and step", job=job(tokens_per_step=2048)),
        ],
        "job-learning-rate": [
            one(
                gpu,
                "linear scaling from 32 to 1024",
                job=job(lr=3e-4, lr_scaling="linear", lr_factor=32.0, lr_reference_batch=32, global_batch=1024),
            ),
            one(gpu, "lr 0.1 for 100,000,000 parameters", job=job(lr=0.1)),
            one(gpu, "2000 steps of warm-up in a run of 1000", job=job(warmup_steps=2000, steps=1000)),
        ],
        # R20
        "job-grace": [
            one(gpu, "a save 2m 00s x 1.5 = 3m 00s, and torchrun's default leaves 30.0 s", job=job(saved=120.0)),
            one(slow, "1.17 GiB at 20.0 MiB/s", job=small_job(saved=None)),
        ],
        "job-threads": [one(cpu, "launch.threads=8 x 2 ranks on 8 CPUs", job=small_job(threads=8))],
    }


def _differences() -> dict[str, list[Sick]]:
    a, b = h100_host("node1"), h100_host("node2")
    roce, other = roce_host("node1"), roce_host("node2")
    moved = tuple(
        msgspec.structs.replace(p, gids=(*ROCE_GIDS[:3], msgspec.structs.replace(ROCE_GIDS[3], index=5)))
        for p in other.rdma
    )
    return {
        "variables-differ": [
            two(with_variables(a, NCCL_ALGO="ring"), b, "NCCL_ALGO is ring on node1 and unset on node2")
        ],
        "versions-differ": [
            two(
                change(a, versions={**a.versions, "torch": "2.12.0"}), b, "torch is 2.12.0 on node1 and 2.13.0 on node2"
            ),
            two(
                a,
                change(b, versions={k: v for k, v in b.versions.items() if k != "nccl"}),
                "nccl is 2.29.3 on node1 and not there on node2",
            ),
        ],
        "gpus-differ": [
            two(change(a, gpus=a.gpus[:7]), b, "the number of GPUs is 7 on node1 and 8 on node2"),
            two(a100_host("node1"), b, "GPU 0 is NVIDIA A100"),
            two(
                a,
                with_gpu(b, 3, power_limit=600.0),
                "the power limit of GPUs is 700 W on node1 and 600 W and 700 W on node2",
            ),
        ],
        "networks-differ": [
            two(
                a,
                with_interface(b, "eth0", mtu=1500),
                "the MTU of the interface to other hosts is 9000 on node1 and 1500 on node2",
            ),
            two(a, with_port(b, 0, active=False), "active RDMA ports is 8 on node1 and 7 on node2"),
            two(a, with_port(b, 0, rate=200e9), "the rate of RDMA ports is 50.0 GB/s on node1"),
            two(
                with_variables(roce, NCCL_IB_GID_INDEX="3"),
                with_variables(change(other, rdma=moved), NCCL_IB_GID_INDEX="3"),
                "the index of the RoCE v2 GID is 3 on node1 and 5 on node2",
            ),
            two(
                with_variables(a, NCCL_SOCKET_IFNAME="eth"),
                with_variables(
                    change(b, interfaces=(LOOPBACK, Interface(name="ens5", mtu=9000, addresses=("10.0.0.2",)))),
                    NCCL_SOCKET_IFNAME="eth",
                ),
                "NCCL_SOCKET_IFNAME selects an interface on node1 and nothing on node2",
            ),
        ],
        "machines-differ": [
            two(
                a,
                with_cpu(b, allowed=tuple(range(64))),
                "the number of CPUs that the job may use is 128 on node1 and 64 on node2",
            ),
            two(a, with_memory(b, total=1024 * GiB), "memory is 1.00 TiB on node2 and up to 2.00 TiB elsewhere"),
            two(a, with_cpu(b, model="EPYC"), "the processor is Xeon on node1 and EPYC on node2"),
        ],
        "clocks-differ": [
            two(clocked(a, 0, 0.0), clocked(b, 1, 3.0), "the clock of node2 is 3.00 s ahead of that of node1")
        ],
        "folders-shared": [
            two(
                with_folder(a, "run", kind="ext4"),
                with_folder(b, "run", kind="ext4"),
                "on a file system of its own on node1 (ext4), node2 (ext4)",
                job=job(),
            )
        ],
    }

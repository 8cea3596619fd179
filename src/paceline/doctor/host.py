"""What the checks read of a machine: a snapshot as plain data, taken here or on another host. Imports no torch.

Every part may be missing: `Host.missing` then says why, and the checks that need the part are not made. Bytes, seconds and
bits per second throughout; link rates as the kernel and the vendors' tools state them.
"""

from __future__ import annotations

import msgspec

FORMAT = 1
"""Version of the snapshot file. A reader refuses a newer one; fields may be added without a new version."""


class Cpu(msgspec.Struct, frozen=True, kw_only=True):
    """Processors and who may use them. `sockets` and `nodes` map a number to its CPUs."""

    model: str = ""
    online: tuple[int, ...] = ()
    allowed: tuple[int, ...] = ()
    quota: float | None = None
    sockets: dict[str, tuple[int, ...]] = {}
    nodes: dict[str, tuple[int, ...]] = {}
    threads_per_core: int = 1
    bf16: bool = False
    fp16: bool = False
    """Whether products in these types have instructions of their own."""
    governor: str = ""
    load: float | None = None
    """Processes that wanted a CPU, the mean over the last minute."""
    busy: float | None = None
    """Share of all CPUs' time that was used while the snapshot was taken."""

    @property
    def usable(self) -> int:
        """CPUs' worth of time that a job gets: those allowed, or the cgroup's quota where it is lower."""
        allowed = len(self.allowed) or len(self.online) or 1
        return allowed if self.quota is None else max(1, min(allowed, int(self.quota)))


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory in bytes. `limit` is the control group's, `limit_used` what counts against it."""

    total: int
    available: int
    swap_used: int = 0
    limit: int | None = None
    limit_used: int | None = None
    oom_kills: int = 0
    numa_balancing: bool = False


class Limit(msgspec.Struct, frozen=True):
    """A resource limit, soft and hard; -1 is unlimited."""

    soft: int
    hard: int


class Folder(msgspec.Struct, frozen=True, kw_only=True):
    """A directory that a job uses and the file system under it. `role` is shm, run, checkpoint, cache, tmp or home."""

    role: str
    path: str
    kind: str = ""
    size: int = 0
    free: int = 0
    inodes: int = 0
    inodes_free: int = 0
    read_only: bool = False
    writable: bool = True
    write_rate: float | None = None
    """Bytes per second of a probe that was written and synced, where one was made."""


class Interface(msgspec.Struct, frozen=True, kw_only=True):
    """A network interface. `kind` is ethernet, infiniband, loopback, bridge, veth, vlan, bond or virtual."""

    name: str
    kind: str = "ethernet"
    up: bool = True
    mtu: int = 1500
    speed: float | None = None
    """Bits per second, where the driver says."""
    addresses: tuple[str, ...] = ()
    receive_packets: int = 0
    receive_errors: int = 0
    receive_dropped: int = 0


class Gid(msgspec.Struct, frozen=True):
    """An entry of a port's GID table. `type` is IB/RoCE v1 or RoCE v2."""

    index: int
    gid: str
    type: str = ""
    interface: str = ""

    @property
    def ipv4(self) -> bool:
        return self.gid.startswith("0000:0000:0000:0000:0000:ffff:")


class RdmaPort(msgspec.Struct, frozen=True, kw_only=True):
    """A port of an RDMA device. `link` is InfiniBand, Ethernet (RoCE) or Unspecified (EFA); rate in bits per second."""

    device: str
    port: int = 1
    active: bool = True
    state: str = "ACTIVE"
    link: str = "InfiniBand"
    rate: float = 0.0
    rate_max: float = 0.0
    driver: str = ""
    interface: str = ""
    node: int | None = None
    gids: tuple[Gid, ...] = ()
    counters: dict[str, int] = {}
    """Error counters of the port: symbol_error, link_downed, port_rcv_errors and their like."""


class Names(msgspec.Struct, frozen=True, kw_only=True):
    """What this host is called, and what the names that it needs resolve to."""

    host: str
    qualified: str = ""
    addresses: tuple[str, ...] = ()
    """What the host's own name resolves to, here."""
    seconds: float = 0.0
    """How long that took."""


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """Another host as seen from this one."""

    name: str
    port: int | None = None
    address: str = ""
    reachable: bool | None = None
    seconds: float = 0.0
    reason: str = ""


class Port(msgspec.Struct, frozen=True, kw_only=True):
    """A TCP port that a run here would listen on."""

    number: int
    free: bool
    holder: str = ""
    low: int = 32768
    high: int = 60999
    """Range that the kernel gives away to outgoing connections."""


class Clock(msgspec.Struct, frozen=True, kw_only=True):
    """Whether time is kept in step with the world, and its estimated error in seconds."""

    synchronised: bool | None = None
    error: float | None = None
    offset: float | None = None
    """Seconds ahead of rank 0, measured where ranks met."""


class NvLink(msgspec.Struct, frozen=True):
    """Links of one GPU: how many there are, how many are up, bytes per second of one."""

    links: int
    active: int
    rate: float = 0.0
    errors: int = 0


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU as its vendor's tool describes it. Clocks in MHz, power in watts, temperature in degrees Celsius."""

    index: int
    name: str
    uuid: str = ""
    vendor: str = "nvidia"
    bus: str = ""
    memory: int = 0
    memory_used: int = 0
    clock: float | None = None
    clock_max: float | None = None
    clock_set: float | None = None
    clock_default: float | None = None
    """The application clock as it is set, and its default, which may lie below the maximum that a GPU reaches."""
    utilisation: float | None = None
    throttle: tuple[str, ...] = ()
    temperature: float | None = None
    temperature_slow: float | None = None
    power_limit: float | None = None
    power_default: float | None = None
    persistence: bool | None = None
    compute_mode: str = "Default"
    mig: bool = False
    ecc: bool | None = None
    ecc_pending: bool | None = None
    uncorrected: int = 0
    """Uncorrected memory errors since the driver was loaded."""
    corrected: int = 0
    remapped_uncorrected: int = 0
    remap_pending: bool = False
    remap_failed: bool = False
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    replays: int = 0
    nvlink: NvLink | None = None
    fabric: str = ""
    """State of the NVSwitch fabric: Completed, In Progress, Not Started; nothing without switches."""
    node: int | None = None
    cpus: tuple[int, ...] = ()


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """A process that holds memory of a GPU."""

    pid: int
    gpu: str
    name: str = ""
    memory: int = 0
    age: float | None = None
    """Seconds since it started; None where it cannot be seen."""
    orphan: bool = False
    """Its parent is gone."""


class Xid(msgspec.Struct, frozen=True):
    """An error that the driver wrote to the kernel log."""

    number: int
    bus: str
    text: str = ""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """The rank that took the snapshot, where a launcher started it."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """One machine. A part that is None or empty and named in `missing` could not be captured."""

    name: str
    format: int = FORMAT
    taken: float = 0.0
    """Seconds since 1970."""
    place: Place | None = None
    environment: dict[str, str] = {}
    files: dict[str, bool] = {}
    """Of each variable that names a file: whether it is there."""
    cpu: Cpu | None = None
    memory: Memory | None = None
    limits: dict[str, Limit] = {}
    folders: tuple[Folder, ...] = ()
    interfaces: tuple[Interface, ...] = ()
    rdma: tuple[RdmaPort, ...] = ()
    names: Names | None = None
    peers: tuple[Peer, ...] = ()
    port: Port | None = None
    clock: Clock | None = None
    versions: dict[str, str] = {}
    gpus: tuple[Gpu, ...] = ()
    gpu_devices: int = 0
    """GPUs on the PCI bus, whether a driver answers for them or not."""
    topology: dict[str, dict[str, str]] = {}
    """Path between two devices (GPU0, NIC0): NV18, PIX, PXB, PHB, NODE or SYS."""
    processes: tuple[Process, ...] = ()
    xids: tuple[Xid, ...] = ()
    peer_memory: bool | None = None
    """Whether a kernel module lets an RDMA device read a GPU's memory."""
    bridges_checked: dict[str, bool] = {}
    """PCI bridges on which access control is on (it sends peer traffic through the root)."""
    transports: tuple[str, ...] | None = None
    """Networks that NCCL's own log says it uses: IB, Socket or a plugin's; None where there is no log."""
    compiler: str | None = None
    virtual: bool = False
    missing: dict[str, str] = {}

    @property
    def rank(self) -> int | None:
        return self.place.rank if self.place else None

    def folder(self, role: str) -> Folder | None:
        return next((f for f in self.folders if f.role == role), None)

    def local_ranks(self) -> int:
        """Ranks of a job here unless told: as launched, else one per GPU, else 2 (1 where there is one core).

        A single rank on a host is doctor's own, started there to look at it.
        """
        if self.place is not None and self.place.local_world_size > 1:
            return self.place.local_world_size
        return len(self.gpus) or min(2, self.cpu.usable if self.cpu else 1)

    def networks(self) -> list[Interface]:
        """Interfaces that reach other hosts: up, and neither loopback nor a container's bridge."""
        return [i for i in self.interfaces if i.up and i.kind not in ("loopback", "bridge", "veth")]

    def fabric(self) -> list[RdmaPort]:
        """RDMA ports that carry traffic."""
        return [p for p in self.rdma if p.active]


PARTS = tuple(
    field.name
    for field in msgspec.structs.fields(Host)
    if field.name not in ("name", "format", "taken", "place", "missing", "virtual", "gpu_devices", "files", "compiler")
)
"""What a check may need, and what can be missing."""

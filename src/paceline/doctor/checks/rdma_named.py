"""NCCL_IB_HCA selects the RDMA devices that are meant, and only those."""

from collections.abc import Iterator, Sequence

from paceline.doctor.check import Check, Found, Given
from paceline.doctor.host import Host, RdmaPort

VARIABLE = "NCCL_IB_HCA"
MOST = 32
"""Devices that NCCL takes at most."""


def selected(value: str, ports: Sequence[RdmaPort]) -> list[RdmaPort]:
    """Ports that a value selects: prefixes of device names, exact ones after `=`, all others after `^`."""
    exclude, text = value.startswith("^"), value.removeprefix("^")
    exact, parts = text.startswith("="), [p.strip() for p in text.removeprefix("=").split(",") if p.strip()]

    def matches(port: RdmaPort) -> bool:
        for part in parts:
            name, number = (*part.split(":"), "")[:2]
            same = port.device == name if exact else port.device.startswith(name)
            if same and (not number or int(number) == port.port):
                return True
        return False

    return [port for port in ports if matches(port) != exclude]


def look(host: Host, given: Given) -> Iterator[Found]:
    value = host.environment.get(VARIABLE, "").strip()
    if not value:
        return
    ports = selected(value, host.rdma)
    names = sorted({port.device for port in host.rdma})
    if not [p for p in ports if p.active]:
        yield Found(
            found=f"{VARIABLE}={value} selects no active RDMA device; there are {', '.join(names)}",
            mend=f"export {VARIABLE}=={','.join(sorted({p.device for p in host.fabric()})) or names[0]}",
            severity="error",
        )
        return
    yield from _too_many(value, ports, host)


def _too_many(value: str, ports: Sequence[RdmaPort], host: Host) -> Iterator[Found]:
    exact = value.removeprefix("^").startswith("=")
    listed = [p.split(":")[0].strip() for p in value.removeprefix("^").removeprefix("=").split(",")]
    extra = sorted({p.device for p in ports} - set(listed))
    digits = [name for name in listed if name[-1:].isdigit()]
    if not exact and not value.startswith("^") and digits and extra:
        yield Found(
            found=f"{VARIABLE}={value} takes {', '.join(extra)} too: a name without = is a prefix",
            mend=f"export {VARIABLE}=={','.join(listed)}",
        )
    links = {p.link for p in ports if p.active}
    if {"InfiniBand", "Ethernet"} <= links:
        wrong = sorted({p.device for p in ports if p.link == "Ethernet"})
        good = sorted({p.device for p in ports if p.link == "InfiniBand"})
        yield Found(
            found=f"{VARIABLE}={value} mixes InfiniBand with Ethernet ports ({', '.join(wrong)})",
            mend=f"export {VARIABLE}=={','.join(good)}",
            severity="error",
        )
    if len({p.device for p in ports}) > MOST:
        yield Found(found=f"{VARIABLE}={value} selects {len({p.device for p in ports})} devices, NCCL takes {MOST}")


CHECK = Check(
    id="rdma-named",
    severity="warning",
    title="NCCL_IB_HCA selects no device, more than are meant, or mixes fabrics",
    why="a storage or management card in the ring sets its pace: 25 Gbit/s among 400 is 16 times slower",
    mend="export NCCL_IB_HCA==mlx5_0,mlx5_1,... with the exact names",
    source="NCCL user guide, NCCL_IB_HCA",
    needs=("environment", "rdma"),
    rdma=True,
    look=look,
)

"""RDMA ports that are down, slower than their neighbours, or count errors."""

from collections.abc import Iterator

from paceline.doctor.check import Check, Found, Given
from paceline.doctor.host import Host
from paceline.units import format_bandwidth

LIMITS = {"symbol_error": 100, "link_downed": 5, "link_error_recovery": 5, "port_rcv_errors": 100}


def look(host: Host, given: Given) -> Iterator[Found]:
    active = host.fabric()
    for port in host.rdma:
        name = f"{port.device} port {port.port}"
        if not port.active:
            if active or given.several:
                yield Found(
                    found=f"{name} is {port.state or 'down'}; {len(active)} of {len(host.rdma)} RDMA ports are active",
                    mend=f"ibstat {port.device}; check cable, switch port and subnet manager; if it is not meant for "
                    f"training, leave it out: NCCL_IB_HCA=^={port.device}",
                )
            continue
        best = max(p.rate for p in active if p.link == port.link)
        if port.rate < best:
            yield Found(
                found=f"{name} runs at {format_bandwidth(port.rate / 8)}, others here at {format_bandwidth(best / 8)}",
                mend=f"ibstat {port.device}; reseat the cable; if it is a slower card by design, leave it out: "
                f"NCCL_IB_HCA=^={port.device}",
                why=f"a ring over all cards goes as fast as its slowest: {best / port.rate:.1f} times slower",
            )
        over = {k: v for k, v in port.counters.items() if v >= LIMITS.get(k, v + 1)}
        if over:
            yield Found(
                found=f"{name} counts " + ", ".join(f"{k} {v}" for k, v in over.items()),
                mend=f"ibqueryerrors; replace the cable of {port.device}",
                severity="warning",
            )


CHECK = Check(
    id="rdma-ports",
    severity="error",
    title="An RDMA port is down, slower than its neighbours, or damaged",
    why="collectives spread over all cards: with 1 of 8 down or slow the other 7 wait for it",
    mend="ibstat; check the cable",
    source="NCCL user guide, Troubleshooting, Networking; Llama 3 report: 35 of 419 interruptions were switches or cables",
    needs=("rdma",),
    rdma=True,
    look=look,
)

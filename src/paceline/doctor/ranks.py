"""Doctor on several hosts: the ranks that torchrun started meet, see each other, and hand their snapshots to rank 0.

Imports torch; `run` loads it by name, and only where a launcher has set a place.
"""

from __future__ import annotations

import contextlib
import socket
import time

import msgspec

from paceline.doctor import snapshot
from paceline.doctor.capture import network
from paceline.doctor.host import Clock, Host
from paceline.workers.rendezvous import World, join, leave

MEET_SECONDS = 120.0
COLLECTIVE_SECONDS = 60.0
NEIGHBOURS = 4
"""Hosts after this one that it tries to reach, beside the first: every pair of hundreds would take minutes."""


def gather(host: Host) -> list[Host] | None:
    """The snapshots of all ranks, on rank 0; None elsewhere. Clocks are read at a common moment.

    Raises:
        JobError, Stalled: the ranks do not meet; the text names host and port.
    """
    world = join(COLLECTIVE_SECONDS, start_timeout=MEET_SECONDS, device_type="cpu")
    host = _with_clock(host, world)
    if world.world_size > world.local_world_size:
        host = _with_peers(host, world)
    # Another key for each rank: the store of a run keeps values, not files.
    world.store.set(f"doctor/{world.rank}", snapshot.encode(host).decode())
    hosts = None
    if world.rank == 0:
        hosts = [snapshot.decode(world.store.get(f"doctor/{r}"), f"of rank {r}") for r in range(world.world_size)]
    world.host_barrier("doctor-told", MEET_SECONDS)
    leave(world)
    return hosts


def _with_clock(host: Host, world: World) -> Host:
    """Seconds that this clock is ahead of rank 0's, to within the barrier's few hundredths."""
    world.host_barrier("doctor-clock", MEET_SECONDS)
    now = time.time()
    if world.rank == 0:
        world.store.set("doctor-clock/now", repr(now))
    first = float(world.store.get("doctor-clock/now"))
    clock = host.clock or Clock()
    missing = {name: reason for name, reason in host.missing.items() if name != "clock"}
    return msgspec.structs.replace(
        host, clock=msgspec.structs.replace(clock, offset=now - first), missing=missing, taken=now
    )


def _with_peers(host: Host, world: World) -> Host:
    """Each host listens on a port of its own; the first rank of each host resolves and calls the ones after it."""
    first = world.local_rank == 0
    nodes = world.world_size // world.local_world_size
    with contextlib.ExitStack() as stack:
        if first:
            listener = stack.enter_context(socket.create_server(("", 0), backlog=128))
            world.store.set(f"doctor-host/{world.node_rank}", f"{host.name}:{listener.getsockname()[1]}")
        world.host_barrier("doctor-listening", MEET_SECONDS)
        if first:
            wanted = {0, *((world.node_rank + step) % nodes for step in range(1, NEIGHBOURS + 1))} - {world.node_rank}
            places = tuple(world.store.get(f"doctor-host/{node}").decode() for node in sorted(wanted))
            host = msgspec.structs.replace(host, peers=network.peers(places))
        world.host_barrier("doctor-called", MEET_SECONDS)
    return host

"""A worker joins its run: the store, the check that all belong together, the process group; and leaves it.

With `run_store` and `gloo`, and `nodes` for several hosts, the only module of `workers` that imports torch.
"""

from __future__ import annotations

import datetime
import os
import socket
import sys
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from paceline.errors import JobError, Stalled
from paceline.workers import affinity, environment, gloo, heartbeat, interfaces
from paceline.workers.barrier import store_barrier
from paceline.workers.environment import Ranks
from paceline.workers.run_store import run_store

BARRIER_SECONDS = 24 * 3600.0


@dataclass(frozen=True)
class World:
    """This rank's place in its run. `store` is the host-side key-value store of the run, not of other runs."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    store: Store

    @property
    def node_rank(self) -> int:
        """Number of this host: ranks of a host follow each other."""
        return self.rank // self.local_world_size

    def shared_key(self, name: str) -> str:
        """A key of the store that is the same on all ranks, and another one at each call; all call it equally often."""
        return f"{name}-{self.store.add(f'turns/{name}/{self.rank}', 1)}"

    def host_barrier(self, name: str, timeout: float = BARRIER_SECONDS) -> None:
        """Wait for all ranks without a collective; see `barrier.store_barrier`. Each name serves once."""
        store_barrier(self.store, name, self.rank, self.world_size, timeout)


def join(
    collective_timeout: float,
    *,
    start_timeout: float = 300.0,
    run_id: str | None = None,
    device_type: str | None = None,
) -> World:
    """Meet the other ranks and make the default process group: under our launcher, under torchrun, or alone.

    Args:
        collective_timeout: seconds after which a collective gives up.
        start_timeout: seconds until all ranks must have come.
        run_id: only ranks with the same one may join; what the launcher set unless given.
        device_type: "cpu" or an accelerator's type; the accelerator, where there is one, unless given.

    Raises:
        JobError: another run's workers, a stranger or no one is at the port, a rank is there twice, or there are fewer
            devices than local ranks.
        Stalled: not all ranks came in time.
    """
    heartbeat.beat(-1, "joining")
    place = environment.ranks()
    device = _device(place, device_type)
    _set_threads(place)
    run_id = run_id or os.environ.get(environment.RUN_ID) or os.environ.get("TORCHELASTIC_RUN_ID", "none")
    deadline = time.monotonic() + start_timeout
    store = run_store(place, run_id, start_timeout)
    # Ranks enter together, so that the group's own timeout need not cover their different starts.
    store_barrier(store, "joined", place.rank, place.world_size, deadline - time.monotonic())
    _choose_interface(place, device)
    gloo.run_one_at_a_time()
    dist.init_process_group(
        _backend(device),
        store=PrefixStore("group", store),
        rank=place.rank,
        world_size=place.world_size,
        timeout=datetime.timedelta(seconds=collective_timeout),
        device_id=device if device.type != "cpu" and place.world_size > 1 else None,
    )
    heartbeat.beat(-1, "joined")
    return World(place.rank, place.local_rank, place.world_size, place.local_world_size, device, store)


def leave(world: World) -> None:
    """Destroy the process group once all ranks are done with it.

    While an exception passes through, nothing is waited for and nothing destroyed: an operation in flight would hold the
    destructor until its timeout, and the end of the process closes every connection as well.
    """
    if sys.exc_info()[1] is not None or not dist.is_initialized():
        return
    try:
        world.host_barrier("leaving", timeout=30.0)
    except (Stalled, RuntimeError):
        # Another rank failed after this one was done: its own end says why.
        return
    dist.destroy_process_group()


def _device(place: Ranks, device_type: str | None) -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if device_type == "cpu" or (device_type is None and accelerator is None):
        return torch.device("cpu")
    if accelerator is None or (device_type is not None and device_type != accelerator.type):
        raise JobError(f"there is no {device_type} device on this host", values={"device": device_type})
    count = torch.accelerator.device_count()
    if place.local_world_size > count:
        raise JobError(
            f"{place.local_world_size} processes on this host, but it has {count} {accelerator.type} devices",
            key="launch.procs_per_node",
            values={"procs": place.local_world_size, "devices": count},
            hint=f"Start {count} processes, one per device.",
        )
    device = torch.device(accelerator.type, place.local_rank)
    torch.accelerator.set_device_index(place.local_rank)
    return device


def _backend(device: torch.device) -> str:
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"


def _set_threads(place: Ranks) -> None:
    """This rank's share of threads where neither our launcher, torchrun nor the user has set them; says what was found."""
    if "OMP_NUM_THREADS" not in os.environ:
        plan = affinity.plan_affinity(place.local_world_size, affinity.rank_cpus(), affinity.cpu_quota(), pin=False)
        torch.set_num_threads(plan[place.local_rank].threads)
    warning = affinity.shrunk_mask_warning(affinity.rank_cpus())
    if warning:
        print(f"paceline: warning: {warning}", file=sys.stderr, flush=True)


def _choose_interface(place: Ranks, device: torch.device) -> None:
    """The interface of Gloo, and of NCCL where it is used: as named by the user, else the loopback of a single host, else
    the one by which rank 0's host is reached.

    Raises:
        JobError: the user's own names one that cannot work.
    """
    several = place.world_size > place.local_world_size
    variables = (interfaces.GLOO,) if device.type == "cpu" else (interfaces.GLOO, interfaces.NCCL)
    for note in interfaces.check_interfaces(os.environ, several, variables):
        print(f"paceline: {note}", file=sys.stderr, flush=True)
    if not several:
        _use_loopback()
        return
    way = interfaces.route_interface(os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0")))
    if way is not None and interfaces.GLOO not in os.environ:
        os.environ[interfaces.GLOO] = way.name
    chosen = os.environ.get(interfaces.GLOO, "its own choice")
    if place.local_rank == 0:
        address = f" ({way.address})" if way is not None and way.name == chosen else ""
        print(f"paceline: node {place.group_rank} speaks through {chosen}{address}", file=sys.stderr, flush=True)


def _use_loopback() -> None:
    """Gloo looks up the host's own name otherwise, which is slow or wrong on many machines."""
    names = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)

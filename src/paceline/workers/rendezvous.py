"""A worker joins its run: the store, the check that all belong together, the process group; and leaves it.

With `gloo`, and `nodes` for several hosts, the only module of `workers` that imports torch.
"""

from __future__ import annotations

import datetime
import math
import os
import socket
import sys
import threading
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from paceline.errors import JobError, Stalled
from paceline.units import format_seconds
from paceline.workers import affinity, environment, gloo, heartbeat, interfaces, ports
from paceline.workers.barrier import store_barrier
from paceline.workers.environment import Ranks

HANDSHAKE_SECONDS = 8.0
"""Once the port answers, the store's greeting takes milliseconds; a stranger never gives it."""

NAME_SECONDS = 8.0
"""A name that resolves to nothing for this long will not be found later either: resolvers try for a few seconds."""

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
    store = _run_store(_store(place, start_timeout), place, run_id, start_timeout)
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


def _store(place: Ranks, start_timeout: float) -> Store:
    if not environment.is_worker():
        return HashStore()
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdigit():
        raise JobError(
            f"RANK and WORLD_SIZE are set, but MASTER_ADDR = {host!r} and MASTER_PORT = {port!r}",
            values={"MASTER_ADDR": host, "MASTER_PORT": port},
            hint="Start with torchrun or paceline, or set all four.",
        )
    hosted_elsewhere = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if place.rank != 0 or hosted_elsewhere:
        return _client(host, int(port), start_timeout)
    given = os.environ.get(environment.LISTEN_FD)
    fd = int(given) if given else ports.listen(int(port), "").detach()
    # The store closes the descriptor.
    return TCPStore(
        host,
        int(port),
        is_master=True,
        timeout=datetime.timedelta(seconds=start_timeout),
        wait_for_workers=False,
        master_listen_fd=fd,
    )


def _client(host: str, port: int, start_timeout: float) -> Store:
    """Connect to rank 0's store. In torch itself a stranger at the port would hold this rank for ever."""
    supervised = environment.is_supervised()
    if not supervised:
        _await_port(host, port, start_timeout)
    found: list[Store] = []
    failed: list[Exception] = []

    def connect() -> None:
        timeout = datetime.timedelta(seconds=start_timeout)
        try:
            found.append(TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False))
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    # Under our launcher the port listens before rank 0 has imported anything.
    thread.join(start_timeout if supervised else HANDSHAKE_SECONDS)
    if found:
        return found[0]
    raise _no_store(host, port, failed[0] if failed else None)


def _no_store(host: str, port: int, error: Exception | None) -> JobError:
    pid = ports.holder(port) if interfaces.is_own_address(host) else None
    reason = str(error).splitlines()[0] if error else "something listens there, but it is no rank 0 of a run"
    return JobError(
        f"cannot join at {host} port {port}{f', held by process {pid}' if pid else ''}: {reason}",
        key="launch.port",
        values={"host": host, "port": port, "pid": pid},
        hint="Choose another MASTER_PORT, or end the process that holds this one.",
    )


def _await_port(host: str, port: int, timeout: float) -> None:
    """Until something listens: rank 0 may start later than this rank. Its host's name must be known before."""
    began = time.monotonic()
    deadline = began + timeout
    reason: OSError | None = None
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host, port), timeout=5.0).close()
        except socket.gaierror as error:
            reason = error
            if time.monotonic() - began > min(NAME_SECONDS, timeout / 2):
                raise _no_name(host, error) from None
            time.sleep(0.5)
            continue
        except OSError as error:
            reason = error
            time.sleep(0.1)
            continue
        return
    raise Stalled(
        f"rank 0 did not listen at {host} port {port} within {format_seconds(timeout)}: {reason}",
        key="recovery.start_timeout",
        values={"host": host, "port": port, "seconds": timeout},
        hint="Check that rank 0 runs and that this host reaches it.",
    )


def _no_name(host: str, error: OSError) -> JobError:
    own = socket.gethostname()
    return JobError(
        f"{own} cannot resolve {host!r}, the name by which rank 0's host is to be reached: {error.strerror}",
        key="MASTER_ADDR",
        values={"name": host, "host": own},
        hint="Give an address that all hosts reach: MASTER_ADDR=ADDRESS, or torchrun --local-addr ADDRESS on rank 0's host.",
    )


def _run_store(store: Store, place: Ranks, run_id: str, start_timeout: float) -> Store:
    """The store's part for this run and attempt, after the check that this process belongs to it."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    scoped = PrefixStore(f"paceline/{attempt}", store)
    scoped.set_timeout(datetime.timedelta(seconds=math.ceil(start_timeout)))
    identity = f"run {run_id!r} of {place.world_size} ranks"
    if place.rank == 0:
        scoped.set("identity", identity)
    try:
        theirs = scoped.get("identity").decode()
    except RuntimeError as error:
        raise Stalled(
            f"rank 0 did not come within {format_seconds(start_timeout)}: {str(error).splitlines()[0]}",
            key="recovery.start_timeout",
        ) from None
    if theirs != identity:
        raise JobError(
            f"this process belongs to {identity}, but those that meet here belong to {theirs}",
            values={"own": identity, "theirs": theirs},
            hint="Give each run a port of its own.",
        )
    if scoped.add(f"rank-{place.rank}", 1) > 1:
        raise JobError(
            f"two processes call themselves rank {place.rank} of {identity}",
            values={"rank": place.rank},
            hint="Give each process its own RANK, or each run a port of its own.",
        )
    return scoped


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

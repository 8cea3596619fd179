"""The key-value store where the ranks of a run meet: rank 0's, found by the others, and made sure to be that of this run."""

from __future__ import annotations

import datetime
import math
import os
import socket
import threading
import time

from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from paceline.errors import JobError, Stalled
from paceline.units import format_seconds
from paceline.workers import environment, interfaces, ports
from paceline.workers.environment import Ranks

HANDSHAKE_SECONDS = 8.0
"""Once the port answers, the store's greeting takes milliseconds; a stranger never gives it."""

NAME_SECONDS = 8.0
"""A name that resolves to nothing for this long will not be found later either: resolvers try for a few seconds."""


def run_store(place: Ranks, run_id: str, start_timeout: float) -> Store:
    """The store of this run and attempt.

    Args:
        start_timeout: seconds until rank 0 must have come.

    Raises:
        JobError: another run's workers, a stranger or no one is at the port, or a rank is there twice.
        Stalled: rank 0 did not come in time.
    """
    return _scoped(_store(place, start_timeout), place, run_id, start_timeout)


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


def _scoped(store: Store, place: Ranks, run_id: str, start_timeout: float) -> Store:
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

"""Supervisors of several hosts meet here: which nodes form the next attempt, in which order, and what they tell each other.

One supervisor per node; `meet` returns the same order on all of them. Nodes may come (they wait at the door until the
others meet again) and go (leaving is local: the rendezvous stays open for those that stay). Underneath is the engine's
own dynamic rendezvous over its store, which the supervisor of the endpoint's host serves.

Imports torch: a supervisor of one node never comes here.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from paceline.errors import JobError, PacelineError, Stalled, from_record
from paceline.units import Procs, format_seconds
from paceline.workers.interfaces import is_own_address, route_interface

KEEP_ALIVE_SECONDS = 1
"""Between two signs of life of a node; after three missed ones it counts as gone. The engine's own 5 s find out later. It
compares the clocks of hosts: one that is off by as much takes all others for gone."""

LAST_CALL_SECONDS = 3.0
"""Enough nodes are there: how long the others may still come before the attempt begins without them."""

STORE_SECONDS = 20.0
"""A call to the store of the endpoint's host may take this long; then that host counts as gone."""

TELL_SECONDS = 60.0
"""What another node has to say next takes it no longer than this: it opens a directory, or starts its workers."""

_LEAVE_SECONDS = 5.0
_POLL_SECONDS = 0.05
_NO_SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Torch 2.13 publishes the address of a store that ranks share in its first round alone: a node that comes to a later one,
where node 0 stayed the same, waits for it for ever. Our ranks make their own, so none is asked for."""

T = TypeVar("T")


class RunOver(Exception):
    """The nodes of the run have ended it: nobody is waited for any longer."""


class NotHeard(Exception):
    """A node did not say in time what it was to say."""


class StoreLost(Exception):
    """The store of the endpoint's host does not answer."""


class _Incomplete(Exception):
    """A node of this round has gone before it said who it is."""


class Party(NamedTuple):
    """The nodes of one attempt, as one of them sees it. `told` is what each node said of itself, by node rank."""

    node_rank: int
    told: tuple[dict[str, Any], ...]
    store: Store

    @property
    def nodes(self) -> int:
        return len(self.told)

    def share(self, key: str, value: Any) -> None:
        """Tell the other nodes of this attempt something, as JSON.

        Raises:
            StoreLost: the host of the endpoint is gone.
        """
        called(lambda: self.store.set(key, json.dumps(value, default=str)))

    def share_error(self, key: str, error: PacelineError) -> None:
        """Have those that `hear` this key raise the error."""
        self.share(key, {"error": error.to_record()})

    def heard(self, key: str) -> Any:
        """What a node shares under a key; None while it shares nothing."""
        if not called(lambda: self.store.check([key])):
            return None
        return json.loads(called(lambda: self.store.get(key)))

    def hear(self, key: str, seconds: float = TELL_SECONDS, is_gone: Callable[[], bool] = lambda: False) -> Any:
        """The same, waiting for it.

        Args:
            is_gone: whether the one that would share it will not do so any more.

        Raises:
            NotHeard: nothing came in time.
            PacelineError: what was shared by `share_error`.
        """
        deadline = time.monotonic() + seconds
        while (value := self.heard(key)) is None:
            if is_gone() or time.monotonic() > deadline:
                raise NotHeard(f"no node of {self.nodes} said {key!r} within {format_seconds(seconds)}")
            time.sleep(_POLL_SECONDS)
        if isinstance(value, dict) and value.get("error"):
            raise from_record(value["error"])
        return value


class Membership:
    """This node's place among the nodes of a run.

    Args:
        endpoint: `host:port` where the supervisors meet; the one whose host it is serves it.
        run: names the run; only nodes that name the same meet.
        wanted: how many nodes an attempt may have.
        seconds: longest wait for the endpoint, and for the least number of nodes.
        last_call: seconds that others may still come once there are enough.

    Attributes:
        serves: whether this process serves the endpoint: the others cannot meet without it.

    Raises:
        JobError: the endpoint is none, or nobody serves it.
    """

    def __init__(
        self, endpoint: str, run: str, wanted: Procs, seconds: float = 300.0, last_call: float = LAST_CALL_SECONDS
    ) -> None:
        os.environ.setdefault(_NO_SHARED_STORE, "1")
        self._endpoint, self._wanted, self._seconds = endpoint, wanted, seconds
        self._host, self._port = split_endpoint(endpoint)
        self._store, self.serves = _store_of(self._host, self._port, seconds)
        backend = C10dRendezvousBackend(PrefixStore("nodes", self._store), run)
        timeout = RendezvousTimeout(
            join=timedelta(seconds=seconds), last_call=timedelta(seconds=last_call), heartbeat=timedelta(seconds=5)
        )
        self._handler = DynamicRendezvousHandler.from_backend(
            run_id=run, store=self._store, backend=backend, min_nodes=wanted.least, max_nodes=int(wanted),
            timeout=timeout, keep_alive_interval=KEEP_ALIVE_SECONDS, keep_alive_max_attempt=3,
        )  # fmt: skip

    @property
    def address(self) -> str:
        """How other nodes reach this one."""
        way = None if self.serves else route_interface(self._host, self._port)
        return self._host if way is None else way.address

    def meet(self, told: Mapping[str, Any]) -> Party:
        """Wait for enough nodes and form the next attempt.

        Args:
            told: what this node says of itself to the others.

        Raises:
            Stalled: too few nodes came, or the host of the endpoint is gone.
            RunOver: the other nodes have ended the run.
        """
        while True:
            with contextlib.suppress(_Incomplete):
                return self._round(told)

    def _round(self, told: Mapping[str, Any]) -> Party:
        while True:
            try:
                info = bounded(self._handler.next_rendezvous, self._seconds + STORE_SECONDS)
                break
            except RendezvousTimeoutError:
                # Who waits at the door of nodes that train is a spare, and waits on.
                if not self._are_running():
                    raise self._too_few() from None
            except (RendezvousClosedError, RendezvousGracefulExitError):
                raise RunOver from None
            except (RendezvousConnectionError, StoreLost):
                raise lost_endpoint(self._endpoint) from None
        party = Party(info.rank, tuple({} for _ in range(info.world_size)), info.store)
        party.share(f"node-{info.rank}", dict(told))
        try:
            return party._replace(told=tuple(party.hear(f"node-{rank}", 15.0) for rank in range(info.world_size)))
        except NotHeard:
            raise _Incomplete from None

    def waiting(self) -> int:
        """How many nodes wait to be let in.

        Raises:
            Stalled: the host of the endpoint is gone.
        """
        try:
            return int(self._handler.num_nodes_waiting())
        except RendezvousError:
            raise lost_endpoint(self._endpoint) from None

    def leave(self) -> None:
        """Give no further sign of life: the others go on without this node. The rendezvous stays open for them."""
        # The engine's own shutdown would close the rendezvous for all.
        with contextlib.suppress(StoreLost):
            bounded(self._handler._stop_heartbeats, _LEAVE_SECONDS)

    def end(self) -> None:
        """The run is over for all nodes: who waits or comes later is told so."""
        with contextlib.suppress(Exception):
            bounded(self._handler.shutdown, _LEAVE_SECONDS)

    def _are_running(self) -> bool:
        with contextlib.suppress(RendezvousError):
            self._handler._state_holder.sync()
            return bool(self._handler._state_holder.state.complete)
        return False

    def _too_few(self) -> Stalled:
        return Stalled(
            f"fewer than {self._wanted.least} nodes came to {self._endpoint} within {format_seconds(self._seconds)}",
            key="launch.nodes",
            values={"least": self._wanted.least, "seconds": self._seconds, "endpoint": self._endpoint},
            hint="Start paceline on the other nodes, lower the least number in launch.nodes, or raise "
            "recovery.start_timeout. If they are started: their clocks must agree within a second, see paceline doctor.",
        )


def split_endpoint(text: str) -> tuple[str, int]:
    """Host and port of `host:port`.

    Raises:
        JobError: it is no such text.
    """
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isdigit() and 0 < int(port) < 65536):
        raise JobError(
            f"{text!r} is no host:port",
            key="launch.rendezvous",
            values={"endpoint": text},
            hint="For example launch.rendezvous=node0:29400, the same on all nodes.",
        )
    return host.strip("[]"), int(port)


def lost_endpoint(endpoint: str) -> Stalled:
    """The error where the store of the endpoint's host does not answer."""
    return Stalled(
        f"the supervisor that served {endpoint} does not answer: its node is gone, and the nodes cannot meet without it",
        key="launch.rendezvous",
        values={"endpoint": endpoint},
        hint="Give the same command again on all nodes; the run goes on from its last checkpoint.",
    )


def called(call: Callable[[], T]) -> T:
    """A call to the store.

    Raises:
        StoreLost: it does not answer.
    """
    try:
        return bounded(call, STORE_SECONDS)
    except (RuntimeError, ValueError, OSError) as error:
        raise StoreLost(str(error).splitlines()[0]) from None


def bounded(call: Callable[[], T], seconds: float) -> T:
    """What a call of the engine gives, which would wait for ever for a host that has gone without a word, and hear no signal.

    Raises:
        StoreLost: it takes longer than `seconds`; its thread is left to itself.
        BaseException: what it raised.
    """
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(call())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="nodes' store", daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed[0]
    if not done:
        raise StoreLost(f"no answer within {format_seconds(seconds)}")
    return done[0]


def _store_of(host: str, port: int, seconds: float) -> tuple[TCPStore, bool]:
    """The store at an endpoint, and whether this process serves it: the first on that host to take the port."""
    timeout = timedelta(seconds=STORE_SECONDS)
    if is_own_address(host):
        with contextlib.suppress(RuntimeError, ValueError, OSError):
            return TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timeout), True
        # Another supervisor of this host was first.
    reason = _await_port(host, port, seconds)
    try:
        if reason is None:
            return TCPStore(host, port, is_master=False, timeout=timeout), False
    except (RuntimeError, ValueError, OSError) as error:
        reason = error
    raise JobError(
        f"nobody serves {host}:{port} after {format_seconds(seconds)}: {str(reason).splitlines()[0]}",
        key="launch.rendezvous",
        values={"host": host, "port": port, "seconds": seconds},
        hint=f"Start paceline on {host} too, with the same launch.rendezvous; see that the port is reachable.",
    )


def _await_port(host: str, port: int, seconds: float) -> Exception | None:
    """Until something listens; why nothing does. The engine's own wait could not be interrupted."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=5.0).close()
            return None
        except OSError as error:
            if time.monotonic() > deadline:
                return error
        time.sleep(0.2)

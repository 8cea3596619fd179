"""Supervisors of several nodes meet here: which nodes form the next attempt, in which order, and what they tell each other.

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
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from paceline.errors import JobError, Stalled
from paceline.units import format_seconds

KEEP_ALIVE_SECONDS = 1
"""Between two signs of life of a node; after three missed ones it counts as gone. The engine's own 5 s find out later."""

LAST_CALL_SECONDS = 3.0
"""Enough nodes are there: how long the others may still come before the attempt begins without them."""

STORE_SECONDS = 20.0
"""A call to the store of the endpoint's host may take this long; then that host counts as gone."""

_POLL_SECONDS = 0.05
_NO_SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Torch 2.13 publishes the address of a store that ranks share in its first round alone: a node that comes to a later one,
where node 0 stayed the same, waits for it for ever. Our ranks make their own, so none is asked for."""


class NodeRange(NamedTuple):
    """How many nodes an attempt may have."""

    least: int
    most: int


class Party(NamedTuple):
    """The nodes of one attempt, as one of them sees it. `told` is what each node said of itself, by node rank."""

    node_rank: int
    told: tuple[dict[str, Any], ...]
    store: Store

    @property
    def nodes(self) -> int:
        return len(self.told)

    def share(self, key: str, value: Any) -> None:
        """Tell the other nodes of this attempt something, as JSON."""
        _called(lambda: self.store.set(key, json.dumps(value)))

    def hear(self, key: str, seconds: float = STORE_SECONDS) -> Any:
        """What a node shares under a key, waiting for it.

        Raises:
            Stalled: nothing came in time.
        """
        deadline = time.monotonic() + seconds
        while not _called(lambda: self.store.check([key])):
            if time.monotonic() > deadline:
                raise Stalled(
                    f"no node of {self.nodes} said {key!r} within {format_seconds(seconds)}",
                    values={"key": key, "seconds": seconds, "nodes": self.nodes},
                    hint="Look at what the supervisor of node 0 printed.",
                )
            time.sleep(_POLL_SECONDS)
        return json.loads(_called(lambda: self.store.get(key)))


class Membership:
    """This node's place among the nodes of a run.

    Args:
        endpoint: `host:port` where the supervisors meet; the one whose port it is serves it.
        run: names the run; only nodes that name the same meet.
        wanted: how many nodes an attempt may have.
        last_call: seconds that others may still come once there are enough.

    Raises:
        JobError: the endpoint is none, or nobody serves it.
    """

    def __init__(self, endpoint: str, run: str, wanted: NodeRange, last_call: float = LAST_CALL_SECONDS) -> None:
        os.environ.setdefault(_NO_SHARED_STORE, "1")
        self._endpoint, self._wanted = endpoint, wanted
        host, port = split_endpoint(endpoint)
        self._store, self.serves = _store_of(host, port)
        backend = C10dRendezvousBackend(PrefixStore("nodes", self._store), run)
        self._handler_args: Mapping[str, Any] = {
            "run_id": run, "store": self._store, "backend": backend, "min_nodes": wanted.least, "max_nodes": wanted.most,
            "keep_alive_interval": KEEP_ALIVE_SECONDS, "keep_alive_max_attempt": 3,
        }  # fmt: skip
        self._last_call = last_call
        self._handler: DynamicRendezvousHandler | None = None

    def meet(self, told: Mapping[str, Any], seconds: float) -> Party:
        """Wait for enough nodes and form the next attempt.

        Args:
            told: what this node says of itself to the others.
            seconds: longest wait for the least number of nodes.

        Raises:
            Stalled: too few nodes came, or the host of the endpoint is gone.
        """
        handler = self._handler or self._new_handler(seconds)
        try:
            info = handler.next_rendezvous()
        except RendezvousTimeoutError:
            raise Stalled(
                f"fewer than {self._wanted.least} nodes came to {self._endpoint} within {format_seconds(seconds)}",
                key="launch.nodes",
                values={"least": self._wanted.least, "seconds": seconds, "endpoint": self._endpoint},
                hint="Start paceline on the other nodes, or lower the least number in launch.nodes.",
            ) from None
        except RendezvousConnectionError:
            raise lost_endpoint(self._endpoint) from None
        info.store.set(f"node-{info.rank}", json.dumps(dict(told)))
        party = Party(info.rank, tuple({} for _ in range(info.world_size)), info.store)
        return party._replace(told=tuple(party.hear(f"node-{rank}") for rank in range(info.world_size)))

    def waiting(self) -> int:
        """How many nodes wait to be let in.

        Raises:
            Stalled: the host of the endpoint is gone.
        """
        if self._handler is None:
            return 0
        try:
            return int(self._handler.num_nodes_waiting())
        except RendezvousConnectionError:
            raise lost_endpoint(self._endpoint) from None

    def leave(self) -> None:
        """Give no further sign of life: the others go on without this node. The rendezvous stays open for them."""
        if self._handler is not None:
            # The engine's own shutdown would close the rendezvous for all.
            self._handler._stop_heartbeats()

    def end(self) -> None:
        """The run is over for all nodes: who waits or comes later is told so."""
        if self._handler is not None:
            with contextlib.suppress(Exception):
                self._handler.shutdown()

    def _new_handler(self, seconds: float) -> DynamicRendezvousHandler:
        timeout = RendezvousTimeout(
            join=timedelta(seconds=seconds),
            last_call=timedelta(seconds=self._last_call),
            heartbeat=timedelta(seconds=5),
        )
        self._handler = DynamicRendezvousHandler.from_backend(**self._handler_args, timeout=timeout)
        return self._handler


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


def _store_of(host: str, port: int) -> tuple[TCPStore, bool]:
    """The store at an endpoint, and whether this process serves it: the first on that host to take the port."""
    if _is_here(host):
        try:
            return TCPStore(
                host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=STORE_SECONDS)
            ), True
        except (RuntimeError, ValueError, OSError):
            pass  # another supervisor of this host was first
    try:
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=300)), False
    except (RuntimeError, ValueError, OSError) as error:
        raise JobError(
            f"nobody serves {host}:{port}: {str(error).splitlines()[0]}",
            key="launch.rendezvous",
            values={"host": host, "port": port},
            hint=f"Start paceline on {host} too, with the same launch.rendezvous; see that the port is reachable.",
        ) from None


def _is_here(host: str) -> bool:
    """Whether an address is one of this host's: only then can a socket be bound to it."""
    try:
        addresses = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in addresses:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return True
    return False


def _called(call: Any) -> Any:
    try:
        return call()
    except (RuntimeError, ValueError, OSError) as error:
        raise Stalled(
            f"the nodes' store does not answer: {str(error).splitlines()[0]}",
            hint="The node that served it is gone; give the same command again on all nodes.",
        ) from None

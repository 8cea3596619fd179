"""A rank on a host of a lab, started by this machine's own supervisor: `python -m tests.netlab.stalling NAMESPACE MASTER`."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

from paceline.workers import environment
from paceline.workers.heartbeat import beat
from paceline.workers.verdict import reported
from tests.netlab.lab import INTERFACE, NAMED

CLONE_NEWNET = 0x40000000


def enter(namespace: str) -> None:
    """The network of a host, for this thread and those that it starts."""
    with (NAMED / namespace).open("rb") as file:
        native = ctypes.CDLL(None, use_errno=True)
        if native.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


def train(namespaces: list[str], master: str) -> int:
    rank = int(os.environ["RANK"])
    enter(namespaces[rank])
    # As one rank of one host each: the port that the supervisor has bound is one of its own network.
    os.environ.pop(environment.LISTEN_FD, None)
    os.environ |= {"MASTER_ADDR": master, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank)}
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    import torch
    import torch.distributed as dist

    from paceline.workers.rendezvous import join

    join(300.0)
    for step in range(100_000):
        beat(step, "training step")
        dist.all_reduce(torch.ones(20_000))
    return 0


def main() -> int:
    *namespaces, master = sys.argv[1:]
    assert all(Path(NAMED / name).exists() for name in namespaces)
    return reported(lambda: train(namespaces, master))


if __name__ == "__main__":
    sys.exit(main())

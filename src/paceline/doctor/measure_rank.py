"""A rank of an A/B: `python -m paceline.doctor.measure_rank SOCKET [cpu]`. Works while it has the turn.

A step is what a small training step is made of: matrix products, then a sum over the ranks.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.workers.rendezvous import World, join, leave

EDGE = 384
PRODUCTS = 6
REDUCED_BYTES = 4 * 2**20
COLLECTIVE_SECONDS = 600.0
"""Longer than any wait for a turn."""


def main() -> None:
    world = join(COLLECTIVE_SECONDS, device_type=sys.argv[2] if len(sys.argv) > 2 else None)
    work = _Work(world)
    if world.rank == 0:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(sys.argv[1])
            with connection.makefile("rwb") as stream:
                for line in stream:
                    stream.write(json.dumps({"seconds": work.turn(float(line)), **report()}).encode() + b"\n")
                    stream.flush()
        work.tell(-1.0)
    else:
        while (seconds := work.hear()) >= 0:
            work.steps(seconds)
    leave(world)


class _Work:
    """The tensors of a step, and how the ranks agree on the length of a turn."""

    def __init__(self, world: World) -> None:
        self._device = world.device
        self._left = torch.randn(EDGE, EDGE, device=self._device)
        self._right = torch.randn(EDGE, EDGE, device=self._device)
        self._summed = torch.ones(REDUCED_BYTES // 4, device=self._device)
        self._message = torch.zeros(1, dtype=torch.float64)

    def tell(self, seconds: float) -> None:
        self._message.fill_(seconds)
        dist.broadcast(self._message, 0)

    def hear(self) -> float:
        dist.broadcast(self._message, 0)
        return float(self._message)

    def turn(self, seconds: float) -> float:
        """Seconds per step of a turn; nothing is done in a turn of no length."""
        self.tell(seconds)
        return self.steps(seconds)

    def steps(self, seconds: float) -> float:
        """Steps until rank 0 says that the time is over."""
        if seconds <= 0:
            return 0.0
        go_on = torch.ones(1)
        made, began = 0, time.perf_counter()
        while float(go_on) > 0:
            for _ in range(PRODUCTS):
                torch.mm(self._left, self._right)
            dist.all_reduce(self._summed)
            self._summed.fill_(1.0)
            if self._device.type != "cpu":
                torch.accelerator.synchronize(self._device)
            made += 1
            go_on.fill_(seconds - (time.perf_counter() - began))
            dist.broadcast(go_on, 0)
        return (time.perf_counter() - began) / made


def report() -> dict[str, Any]:
    """What this rank runs with: what shows that a setting took effect."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "threads": torch.get_num_threads(),
        "cpus": cpus,
        "addresses": ",".join(sorted(_own_addresses())),
        "debug": dist.get_debug_level().name,  # type: ignore[attr-defined]
    }


def _own_addresses() -> set[str]:
    """Addresses at which Gloo's connections of this process end (Linux)."""
    inodes = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            inodes.add(str(entry.readlink()))
        except OSError:
            continue
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    established = [row for row in rows if row[3] == "01" and f"socket:[{row[9]}]" in inodes]
    store = {int(os.environ.get("MASTER_PORT", "0"))}
    found = set()
    for row in established:
        local, remote = (end.split(":") for end in row[1:3])
        if not {int(local[1], 16), int(remote[1], 16)} & store:
            found.add(socket.inet_ntoa(bytes.fromhex(local[0])[::-1]))
    return found


if __name__ == "__main__":
    main()

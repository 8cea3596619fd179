"""What a rank writes at the end of a window of steps: its parts, and a few cheap facts that tell why it is slow."""

from __future__ import annotations

import platform
import time
from typing import Any

import torch

from paceline.telemetry.held_back import HeldBack
from paceline.telemetry.links import Links
from paceline.workers.affinity import allowed_cpus
from paceline.workers.environment import ranks

HOST = platform.node()

PROBE_SIZE = 96
PROBE_TIMES = 5


class WindowFacts:
    """Facts of one rank beside the parts of its steps, each since the last window.

    The probe is the shortest of a few small products of matrices on the host: all together some tenths of a millisecond.
    A device that runs behind the host is not probed, since that would wait for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._probed = torch.ones(PROBE_SIZE, PROBE_SIZE) if device.type == "cpu" else None
        self._links = Links()
        threads = min(torch.get_num_threads(), len(allowed_cpus()))
        self._held_back = HeldBack(threads, alone=ranks().local_world_size == 1)
        self._cpu = time.process_time()

    def since_last(self) -> dict[str, Any]:
        """Fields of a `window` record."""
        before, self._cpu = self._cpu, time.process_time()
        address, links = self._links.since_last()
        return {
            "cpu_seconds": self._cpu - before, "held_back_seconds": self._held_back.since_last(),
            "probe_seconds": self._probe(), "address": address, "links": links,
        }  # fmt: skip

    def _probe(self) -> float | None:
        if self._probed is None:
            return None
        spent = []
        for _ in range(PROBE_TIMES):
            began = time.perf_counter()
            torch.mm(self._probed, self._probed)
            spent.append(time.perf_counter() - began)
        return min(spent)

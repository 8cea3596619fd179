"""Runs flows between hosts: one rank of each host sends and receives, chunk after chunk, and times what arrives.

Over Gloo, and so over the IP network of the hosts, whatever devices they have: what NCCL makes of a fabric is measured by
`bench collectives`.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist

from paceline.bench.pairs import Flow, Seen
from paceline.bench.resent import Segments, segments
from paceline.errors import Stalled
from paceline.parallel.collectives import gather_objects
from paceline.units import MiB, format_seconds
from paceline.workers.heartbeat import beat

DEPTH = 4
"""Chunks under way at once: the next ones are asked for while one arrives."""

CHUNKS = 40
"""In the time of a flow, of the size that its last rate gives: enough to see where it stalls."""

FEWEST_CHUNKS = 8
SMALLEST_CHUNK_BYTES, LARGEST_CHUNK_BYTES = 8 * 1024, 16 * MiB
FIRST_RATE = 20e6
"""Bytes per second that a host is taken to have with another one before anything is known."""

SETTLE = 0.15
"""Share of a flow's time that is not counted: a connection finds its rate."""

PARTS = 5
LONG = 4.0
"""A gap stalls where it is this many times the usual one."""

LIMIT_SECONDS = 20.0
"""Longest wait for one chunk; a slower fabric than that is taken for cut."""


class Own(NamedTuple):
    """This rank's part of some flows: what it received, and which share it had to send again."""

    seen: Seen | None
    sent: Flow | None
    segments: Segments | None


class Fabric:
    """The hosts of a run as the ends of flows. All ranks make one and call it alike.

    Args:
        hosts: their names, in the order of their numbers.
        speakers: the rank of each that measures; the others wait.
        seconds: how long a flow runs.
    """

    def __init__(self, hosts: Sequence[str], speakers: Sequence[int], seconds: float) -> None:
        self.hosts = list(hosts)
        self.speakers = list(speakers)
        self.seconds = seconds
        rank = dist.get_rank()
        self._own = self.speakers.index(rank) if rank in self.speakers else None
        self._rates: dict[Flow, float] = {}

    def measure(self, flows: Sequence[Flow]) -> list[Seen]:
        """Run all these flows at once; no host may be twice a source or twice a target.

        Raises:
            Stalled: a host stopped answering; names it.
        """
        beat(0, "measuring flows")
        dist.all_reduce(torch.zeros(1))
        own = self._take_part(flows)
        parts: list[Own] = gather_objects(own, dist.group.WORLD)
        sent = {part.sent: part.segments for part in parts if part.sent is not None}
        found = {part.seen.flow: part.seen for part in parts if part.seen is not None}
        self._rates.update({flow: seen.bytes_per_second for flow, seen in found.items()})
        return [_with_segments(found[flow], sent.get(flow)) for flow in flows]

    def _take_part(self, flows: Sequence[Flow]) -> Own:
        out = next((flow for flow in flows if flow.source == self._own), None)
        into = next((flow for flow in flows if flow.target == self._own), None)
        before = segments()
        failed: list[RuntimeError] = []

        def send() -> None:
            try:
                if out is not None:
                    self._send(out)
            except RuntimeError as error:
                failed.append(error)

        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        try:
            seen = None if into is None else self._receive(into)
        except RuntimeError as error:
            raise self._silent(into, error) from None
        sender.join()
        if failed:
            raise self._silent(out, failed[0]) from None
        return Own(seen, out, _since(before, segments()) if out is not None else None)

    def _chunk_bytes(self, flow: Flow) -> int:
        size = int(self._rates.get(flow, FIRST_RATE) * self.seconds / CHUNKS)
        return max(SMALLEST_CHUNK_BYTES, min(LARGEST_CHUNK_BYTES, size))

    def _send(self, flow: Flow) -> None:
        """Chunks until the time is over. The first byte of one says that as many follow as are asked for already."""
        target = self.speakers[flow.target]
        buffers = [torch.zeros(self._chunk_bytes(flow), dtype=torch.uint8) for _ in range(DEPTH)]
        under_way: deque[dist.Work] = deque()
        until = time.monotonic() + self.seconds
        count, end = 0, None
        while end is None or count < end:
            if len(under_way) == DEPTH:
                _wait(under_way.popleft())
            buffer = buffers[count % DEPTH]
            if end is None and count >= FEWEST_CHUNKS and time.monotonic() > until:
                buffer[0] = 1
                end = count + DEPTH
            under_way.append(_work(dist.isend(buffer, target)))
            count += 1
        for work in under_way:
            _wait(work)

    def _receive(self, flow: Flow) -> Seen:
        source = self.speakers[flow.source]
        size = self._chunk_bytes(flow)
        buffers = [torch.zeros(size, dtype=torch.uint8) for _ in range(DEPTH)]
        asked: deque[dist.Work] = deque(_work(dist.irecv(buffer, source)) for buffer in buffers)
        arrived: list[float] = []
        ended = False
        while asked:
            _wait(asked.popleft())
            if ended:
                continue
            arrived.append(time.monotonic())
            buffer = buffers[(len(arrived) - 1) % DEPTH]
            ended = bool(buffer[0])
            if not ended:
                asked.append(_work(dist.irecv(buffer, source)))
        return seen_of(flow, size, arrived)

    def _silent(self, flow: Flow | None, error: RuntimeError) -> Stalled:
        assert flow is not None  # for the type checker: only a flow can fail
        source, target = self.hosts[flow.source], self.hosts[flow.target]
        return Stalled(
            f"data from {source} to {target} stopped: {str(error).splitlines()[0]}",
            values={"source": source, "target": target, "seconds": LIMIT_SECONDS},
            hint=f"Look at what the ranks of both printed last, and whether {source} and {target} reach each other; "
            f"a chunk may take {format_seconds(LIMIT_SECONDS)}.",
        )


def seen_of(flow: Flow, chunk_bytes: int, arrived: Sequence[float]) -> Seen:
    """Rate, its error and stalls, from the seconds at which chunks had arrived whole."""
    begin = next(k for k, when in enumerate(arrived) if when - arrived[0] >= SETTLE * (arrived[-1] - arrived[0]))
    gaps = [later - earlier for earlier, later in pairwise(arrived[min(begin, len(arrived) - 3) :])]
    total = sum(gaps)
    usual = statistics.median(gaps)
    stalled = sum(gap - LONG * usual for gap in gaps if gap > LONG * usual)
    return Seen(
        flow.source, flow.target, chunk_bytes * len(gaps) / total, error=_error_of(gaps), stalled=stalled / total
    )


def _error_of(gaps: Sequence[float]) -> float:
    """Standard error of the rate, as a share, from parts of the time."""
    count = min(PARTS, len(gaps))
    edges = [k * len(gaps) // count for k in range(count + 1)]
    rates = [(b - a) / sum(gaps[a:b]) for a, b in pairwise(edges)]
    if count < 2:
        return 0.0
    return statistics.stdev(rates) / statistics.mean(rates) / math.sqrt(count)


def _with_segments(seen: Seen, counted: Segments | None) -> Seen:
    if counted is None or counted.sent <= 0:
        return seen
    return msgspec.structs.replace(seen, resent=counted.resent / counted.sent, segments=counted.sent)


def _since(before: Segments | None, after: Segments | None) -> Segments | None:
    if before is None or after is None:
        return None
    return Segments(after.sent - before.sent, after.resent - before.resent)


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None  # for the type checker: None is for ranks outside the group
    return work


def _wait(work: dist.Work) -> None:
    work.wait(timedelta(seconds=LIMIT_SECONDS))

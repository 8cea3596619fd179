"""One rank of `paceline bench collectives`: tiers, groups, the sweep, and the check of every size."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist

from paceline.bench.calls import TYPES, Exchange
from paceline.bench.place import Place, node_names
from paceline.bench.rank import Rank, Timer, clock, joined, meet
from paceline.bench.rows import make_row
from paceline.bench.sweep import ELEMENT_BYTES, Options, Point, check_memory, points, sizes
from paceline.bench.transport import read_log
from paceline.cluster.measured import ACROSS_NODES, IN_NODE, TierName
from paceline.cluster.ports import rdma_ports
from paceline.cluster.probe import available_memory_bytes
from paceline.parallel.collectives import gather_objects
from paceline.parallel.strategy import CollectiveKind
from paceline.parallel.wire import GLOO
from paceline.workers.heartbeat import beat


class Tier(NamedTuple):
    """The ranks that this rank measures with on one tier: of its node, or all of them. `nodes` that they are on."""

    name: TierName
    members: list[int]
    nodes: int
    group: dist.ProcessGroup
    everyone: list[list[int]]
    """The members of all groups of this tier, this rank's among them: every rank makes every group."""

    def fresh_group(self) -> dist.ProcessGroup:
        """This rank's group once more, with new connections."""
        made: list[dist.ProcessGroup] = [dist.new_group(members) for members in self.everyone]
        return made[self.everyone.index(self.members)]


def options_of(record: dict[str, Any]) -> Options:
    """What the ranks are told, from the file that they read it from."""
    known = {name: record[name] for name in Options._fields if name in record}
    return Options(**known | {key: tuple(known[key]) for key in ("collectives", "tiers") if key in known})


def program(rank: Rank) -> None:
    """Measure what the options ask for, and tell each row as soon as there is one, and again when it is final."""
    options = options_of(rank.options)
    here = Place.here(rank.world.rank, _device_name(rank))
    places: list[Place] = gather_objects(here, dist.group.WORLD)
    memory = _memory(rank)
    check_memory(options, rank.world.world_size, _sharing(rank, places, here), rank.backend, memory)
    rank.tell(_about(rank, places))
    tiers = _tiers(places, options)
    total = sum(len(_points(kind, tier, options)) for tier in tiers for kind in options.collectives)
    rank.tell({"kind": "total", "rows": total})
    for tier in tiers:
        for kind in options.collectives:
            _sweep_one(rank, options, tier, kind)
    if options.pairs:
        _pairs(rank, options, places)
    transport = read_log(rank.nccl_log)
    if transport is not None:
        rank.tell({"kind": "transport", **msgspec.to_builtins(transport)})


def _sweep_one(rank: Rank, options: Options, tier: Tier, kind: CollectiveKind) -> None:
    """All sizes of one collective on one tier, in rounds, each with buffers of its own.

    Where buffers lie costs or saves some percent for as long as they live, and over Gloo inside a node so do connections: a
    sweep that draws them several times says what the next run will see. Between nodes a connection needs its time to find
    the rate of the link, and is kept.
    """
    timers: dict[Point, Timer] = {}
    wrong: dict[Point, int] = {}
    unsettled = _points(kind, tier, options)
    while unsettled:
        group = tier.fresh_group() if rank.backend == GLOO and tier.name == IN_NODE else tier.group
        exchange = Exchange(kind, unsettled[-1], tier.members, group, TYPES[options.dtype], rank.world.device)
        for point in unsettled:
            beat(0, f"measuring {kind} of {point.size_bytes} bytes")
            call = exchange.at(point)
            if point not in timers:
                timers[point] = _timer(rank, options, call)
            timers[point].round(call)
            if point not in wrong:
                wrong[point] = _wrong(exchange, point)
            rounds = timers[point].rounds
            row = make_row(point, tier.name, len(tier.members), tier.nodes, options.dtype, rounds, wrong[point])
            rank.tell({"kind": "row", **msgspec.structs.asdict(row)})
        if group is not tier.group:
            dist.destroy_process_group(group)
        unsettled = [point for point in unsettled if not timers[point].settled]


def _timer(rank: Rank, options: Options, call: Callable[[], None]) -> Timer:
    return Timer(call, rank.world.device, warmup=options.warmup, iterations=options.iterations, seconds=options.seconds)


def _wrong(exchange: Exchange, point: Point) -> int:
    """Wrong elements of all ranks."""
    counted = torch.tensor([exchange.wrong(point)], dtype=torch.int64)
    dist.all_reduce(counted)
    return int(counted.item())


def _points(kind: CollectiveKind, tier: Tier, options: Options) -> list[Point]:
    wanted = sizes(options.min_bytes, options.max_bytes, options.factor)
    return points(kind, wanted, len(tier.members), ELEMENT_BYTES[options.dtype])


def _tiers(places: list[Place], options: Options) -> list[Tier]:
    """In the node where all nodes have equally many ranks and several, across nodes where there are several nodes.

    In the node all nodes measure at once, and the slowest counts. Across nodes all ranks take part, as in nccl-tests and in
    a job that shards over all of them.
    """
    nodes = {name: [place.rank for place in places if place.node == name] for name in node_names(places)}
    world = dist.group.WORLD
    assert world is not None  # for the type checker: `join` has made it
    found = []
    lengths = {len(members) for members in nodes.values()}
    if len(lengths) == 1 and lengths != {1}:
        # Every rank makes every group.
        groups = {name: world if len(nodes) == 1 else dist.new_group(members) for name, members in nodes.items()}
        own = places[dist.get_rank()].node
        found.append(Tier(IN_NODE, nodes[own], 1, groups[own], list(nodes.values())))
    if len(nodes) > 1:
        ranks = [place.rank for place in places]
        found.append(Tier(ACROSS_NODES, ranks, len(nodes), world, [ranks]))
    return [tier for tier in found if not options.tiers or tier.name in options.tiers]


def _device_name(rank: Rank) -> str:
    device = rank.world.device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _memory(rank: Rank) -> int:
    device = rank.world.device
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_memory_bytes()


def _sharing(rank: Rank, places: list[Place], here: Place) -> int:
    """Ranks that share the memory of `_memory`."""
    return 1 if rank.world.device.type == "cuda" else sum(place.host == here.host for place in places)


def _about(rank: Rank, places: list[Place]) -> dict[str, Any]:
    """What was measured on: nccl-tests' lines per rank, and the versions."""
    version: Any = torch.cuda.nccl.version
    nccl = ".".join(map(str, version())) if rank.backend == "nccl" else None
    return {
        "kind": "about", "backend": rank.backend, "torch": torch.__version__, "nccl": nccl,
        "python": platform.python_version(), "nodes": len(node_names(places)),
        "ranks": [place._asdict() for place in places], "threads": torch.get_num_threads(),
        "ports": msgspec.to_builtins(rdma_ports()),
        "cpu_affinity": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
    }  # fmt: skip


def _pairs(rank: Rank, options: Options, places: list[Place]) -> None:
    """Each ordered pair of ranks alone: a block of sends, answered by one element once all have come."""
    element = ELEMENT_BYTES[options.dtype]
    size = min(options.max_bytes, 4 << 20) // element * element
    buffer = torch.zeros(size // element, dtype=TYPES[options.dtype], device=rank.world.device)
    for source in range(rank.world.world_size):
        for target in range(rank.world.world_size):
            if source == target:
                continue
            seconds = _pair_seconds(rank, buffer, source, target, calls=max(2, options.iterations // 4))
            rank.tell(
                {"kind": "pair", "source": source, "target": target, "source_host": places[source].node,
                 "target_host": places[target].node, "size_bytes": size, "time_us": seconds * 1e6,
                 "algorithm_bandwidth": size / seconds / 1e9}
            )  # fmt: skip


def _pair_seconds(rank: Rank, buffer: torch.Tensor, source: int, target: int, calls: int) -> float:
    """Seconds per message from `source` to `target`: the best of three blocks, as the source sees it."""
    own, answer = rank.world.rank, torch.zeros(1, device=rank.world.device)
    best = float("inf")
    for block in range(4):
        meet()
        elapsed = clock(rank.world.device)
        for _ in range(calls):
            if own == source:
                dist.send(buffer, target)
            elif own == target:
                dist.recv(buffer, source)
        if own == source:
            dist.recv(answer, target)
        elif own == target:
            dist.send(answer, source)
        seconds = elapsed() / calls
        # The first one opens the connection.
        best = min(best, seconds if block and own == source else float("inf"))
    shared = torch.tensor([best], dtype=torch.float64)
    dist.all_reduce(shared, op=dist.ReduceOp.MIN)
    return float(shared.item())


def main() -> None:
    with joined() as rank:
        program(rank)


if __name__ == "__main__":
    main()

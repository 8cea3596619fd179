"""Seconds of an exchange between ranks, by where they are. Imports no torch.

A ring moves its bytes over the slowest link that it crosses. Groups that leave their node share its network cards: with
g members on a node, a group's ring has the cards of g devices. Latency is that of a ring or of a tree, whichever is
less. Switches that sum by themselves speed up what the catalogue says, within a node, from five devices on.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from paceline.cluster.measured import ACROSS_NODES, IN_NODE, Fit
from paceline.parallel.layout import AXES, Layout
from paceline.parallel.strategy import Collective, CollectiveKind
from paceline.parallel.wire import bus_factor
from paceline.plan.setting import Setting

START_SECONDS = 12e-6
"""From the call of a collective to its first byte."""

IN_SWITCH_FROM = 5
"""Devices from which on switches sum in place of a ring (stas00/ml-engineering: 5 on an H200 node)."""


class Group(NamedTuple):
    """Ranks that exchange, and how many of them are on one node."""

    ranks: int
    per_node: int

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.per_node)


def group_of(layout: Layout, axes: tuple[str, ...], devices_per_node: int) -> Group:
    """The group over neighbouring axes, of ranks that fill a node before the next."""
    degrees = layout.degrees()
    ranks = math.prod(degrees[axis] for axis in axes)
    last = max(AXES.index(axis) for axis in axes)
    stride = math.prod(degrees[axis] for axis in AXES[last + 1 :])
    here = max(1, devices_per_node // stride) if stride < devices_per_node else 1
    return Group(ranks, min(ranks, here))


def bus_bandwidth(kind: CollectiveKind, group: Group, setting: Setting) -> float:
    """Bytes/s of a ring of large messages."""
    link, fabric = setting.link, setting.fabric
    if group.nodes == 1 or fabric is None:
        within = link or fabric
        if within is None:
            return math.inf
        by_switch = within.reduces.get(kind, 0.0) if group.ranks >= IN_SWITCH_FROM else 0.0
        return max(within.reached_bytes_per_second, by_switch)
    across = fabric.reached_bytes_per_second * group.per_node
    return min(across, link.reached_bytes_per_second) if link is not None and group.per_node > 1 else across


def seconds_of(
    kind: CollectiveKind, size_bytes: float, calls: float, group: Group, setting: Setting, factor: float = 1.0
) -> float:
    """Seconds of `calls` calls that carry `size_bytes` in all, counted as nccl-tests does."""
    if group.ranks == 1 or calls == 0:
        return 0.0
    measured = _measured(kind, group, setting)
    if measured is not None:
        as_there = bus_factor(kind, group.ranks) / bus_factor(kind, measured.ranks)
        return calls * measured.seconds(size_bytes / calls) * as_there * factor
    moved = bus_factor(kind, group.ranks) * size_bytes / bus_bandwidth(kind, group, setting)
    return (moved + calls * (START_SECONDS + _latency(kind, group, setting))) * factor


def seconds(collective: Collective, group: Group, setting: Setting, factor: float = 1.0) -> float:
    """Seconds of a strategy's collective."""
    return seconds_of(collective.kind, collective.size_bytes, collective.count, group, setting, factor)


def send_seconds(size_bytes: float, across_nodes: bool, setting: Setting, factor: float = 1.0) -> float:
    """Seconds of one message from a rank to its neighbour."""
    way = setting.fabric if across_nodes and setting.fabric is not None else setting.link or setting.fabric
    if way is None:
        return 0.0
    return (START_SECONDS + way.latency_seconds + size_bytes / way.reached_bytes_per_second) * factor


def _measured(kind: CollectiveKind, group: Group, setting: Setting) -> Fit | None:
    """What was measured of a collective inside a node or between nodes, of as many ranks as can be."""
    tier = IN_NODE if group.nodes == 1 else ACROSS_NODES
    found = [fit for fit in setting.fits if fit.collective == kind and fit.tier == tier]
    return min(found, key=lambda fit: abs(fit.ranks - group.ranks), default=None)


def _latency(kind: CollectiveKind, group: Group, setting: Setting) -> float:
    near = setting.link.latency_seconds if setting.link else 0.0
    far = setting.fabric.latency_seconds if setting.fabric else near
    if kind == "send_recv":
        return far if group.nodes > 1 else near
    passes = 2 if kind == "all_reduce" else 1
    ring = passes * ((group.ranks - group.nodes) * near + group.nodes * (far if group.nodes > 1 else 0.0))
    tree = passes * (group.per_node * near + math.log2(group.nodes) * 2 * far) if group.nodes > 1 else ring
    return min(ring, tree) if kind == "all_reduce" else ring

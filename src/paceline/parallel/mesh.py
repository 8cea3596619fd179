"""The device mesh of a layout: built once, from the axes that split something, in the order of `layout.AXES`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from paceline.parallel.layout import AXES, REPLICAS, SHARDS, TOKENS, Layout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Axes = tuple[str, ...]


@dataclass(frozen=True)
class Mesh:
    """A layout's process groups. `device_mesh` is None where all ranks are replicas: their group is the world."""

    layout: Layout
    device_mesh: DeviceMesh | None
    joined: Mapping[Axes, DeviceMesh] = field(default_factory=dict)

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """The ranks that differ from this one in these axes alone; None where there is no other one.

        Of several axes the groups are there that `SHARDS`, `REPLICAS` and `TOKENS` name.
        """
        split = self._split(axes)
        if not split:
            return None
        if self.device_mesh is None or split == self.layout.split_axes():
            return dist.group.WORLD
        return self.device_mesh.get_group(split[0]) if len(split) == 1 else self.joined[split].get_group()

    def degree(self, *axes: str) -> int:
        """Ranks of the group of these axes."""
        group = self.group(*axes)
        return 1 if group is None else dist.get_world_size(group)

    def state_mesh(self) -> DeviceMesh:
        """The mesh for fully sharded state: one dim of shards, with a dim of replicas before it where there are any.

        Raises:
            ValueError: the layout splits no state.
        """
        shards = self._split(SHARDS)
        if self.device_mesh is None or self.layout.dp_shard == 1:
            raise ValueError("a mesh without dp_shard splits nothing")
        name = _name(shards)
        if self.layout.dp_replicate > 1:
            return self.device_mesh["dp_replicate", name]
        return self.device_mesh[name]

    def _split(self, axes: Sequence[str]) -> Axes:
        return tuple(axis for axis in self.layout.split_axes() if axis in axes)


def build_mesh(layout: Layout, device: torch.device) -> Mesh:
    """The mesh of a layout over all ranks, which call this alike. Its groups wait as long as the world's does.

    Raises:
        ValueError: the layout is not made for this number of ranks.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if layout.world_size != ranks:
        raise ValueError(f"{layout} is a layout of {layout.world_size} ranks, and {ranks} are there")
    axes = layout.split_axes()
    if axes in ((), ("dp_replicate",)):
        return Mesh(layout, None)
    from torch.distributed.device_mesh import init_device_mesh

    shape = tuple(layout.degrees()[axis] for axis in axes)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=axes)
    joined = {}
    for several in dict.fromkeys(tuple(a for a in axes if a in wanted) for wanted in (SHARDS, REPLICAS, TOKENS)):
        if len(several) > 1 and (several != axes or several == SHARDS):
            joined[several] = mesh[several]._flatten(_name(several))
    for group in (*(mesh.get_group(axis) for axis in axes), *(m.get_group() for m in joined.values())):
        _wait_like_the_world(group, device)
    return Mesh(layout, mesh, joined)


def subgroup(mesh: Mesh, axis: str, size: int) -> dist.ProcessGroup | None:
    """This rank's group of `size` neighbours along an axis; all ranks call this alike. None for a size of 1.

    Args:
        size: divides the axis's degree.
    """
    if size == 1:
        return None
    layout = mesh.layout
    if size == layout.degrees()[axis]:
        return mesh.group(axis)
    members: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        members.setdefault(tuple(at[a] // size if a == axis else at[a] for a in AXES), []).append(rank)
    own: dist.ProcessGroup | None = None
    for ranks in members.values():
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            own = group
    assert own is not None
    _wait_like_the_world(own, torch.device(mesh.device_mesh.device_type if mesh.device_mesh else "cpu"))
    return own


def _name(axes: Axes) -> str:
    """Of a mesh's dim."""
    return "_".join(axes)


def _wait_like_the_world(group: dist.ProcessGroup, device: torch.device) -> None:
    """New groups come with the backend's default of 10 or 30 minutes, which is longer than a stall may last."""
    world = dist.group.WORLD
    if group is world or world is None:
        return
    timeout = world._get_backend(device).options._timeout
    dist.distributed_c10d._set_pg_timeout(timeout, group)

"""The device mesh of a layout: built once, from the axes that split something, in the order of `layout.AXES`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from paceline.parallel.layout import AXES, Layout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Mesh:
    """A layout's process groups. `device_mesh` is None where all ranks are replicas: their group is the world."""

    layout: Layout
    device_mesh: DeviceMesh | None

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The ranks that share an axis with this one; None where its degree is 1."""
        if self.layout.degrees()[axis] == 1:
            return None
        return dist.group.WORLD if self.device_mesh is None else self.device_mesh.get_group(axis)


def build_mesh(layout: Layout, device: torch.device) -> Mesh:
    """The mesh of a layout over all ranks. Groups of single axes wait as long as the world's does.

    Raises:
        ValueError: the layout is not made for this number of ranks.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if layout.world_size != ranks:
        raise ValueError(f"{layout} is a layout of {layout.world_size} ranks, and {ranks} are there")
    axes = [axis for axis in AXES if layout.degrees()[axis] > 1]
    if axes in ([], ["dp_replicate"]):
        return Mesh(layout, None)
    from torch.distributed.device_mesh import init_device_mesh

    shape = tuple(layout.degrees()[axis] for axis in axes)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=tuple(axes))
    for axis in axes:
        _wait_like_the_world(mesh.get_group(axis), device)
    return Mesh(layout, mesh)


def _wait_like_the_world(group: dist.ProcessGroup, device: torch.device) -> None:
    """New groups come with the backend's default of 10 or 30 minutes, which is longer than a stall may last."""
    world = dist.group.WORLD
    if group is world or world is None:
        return
    timeout = world._get_backend(device).options._timeout
    dist.distributed_c10d._set_pg_timeout(timeout, group)

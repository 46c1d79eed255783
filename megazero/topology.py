"""Process groups over the rank grid: a thin layer on torch's DeviceMesh, passed to whoever communicates."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh

from megazero.comm import Communicator
from megazero.layout import AXES, Axis, Layout


class Topology:
    """One rank's place in the grid and its groups. The default process group must exist when world size > 1."""

    def __init__(self, layout: Layout, rank: int, device: torch.device) -> None:
        self.layout, self.rank, self.device = layout, rank, device
        self.coordinates: Mapping[Axis, int] = layout.coordinates(rank)
        self._groups: dict[tuple[Axis, tuple[int, ...]], ProcessGroup] = {}
        world = dist.group.WORLD if layout.world_size > 1 else None
        self.world = Communicator(world, layout.world_size, rank)
        if layout.world_size > 1:
            shape = tuple(layout.size(axis) for axis in AXES)
            mesh = init_device_mesh(device.type, shape, mesh_dim_names=AXES)
            for axis in AXES:
                if layout.size(axis) > 1:
                    self._groups[axis, tuple(range(layout.size(axis)))] = mesh.get_group(axis)

    def group(self, axis: Axis, members: tuple[int, ...] | None = None) -> ProcessGroup | None:
        """The group along ``axis`` through this rank, or of the coordinates ``members`` of it only.

        None for a group of one. A group of some members is made on first use, by its members alone.
        """
        members = members or tuple(range(self.layout.size(axis)))
        assert self.coordinates[axis] in members, (axis, members, self.coordinates)
        if len(members) == 1:
            return None
        if (axis, members) not in self._groups:
            ranks = self.layout.along(self.rank, axis, members)
            self._groups[axis, members] = dist.new_group(ranks, use_local_synchronization=True)
        return self._groups[axis, members]

    def communicator(self, axis: Axis, members: tuple[int, ...] | None = None) -> Communicator:
        """In-place collectives along ``axis``."""
        members = members or tuple(range(self.layout.size(axis)))
        return Communicator(self.group(axis, members), len(members), members.index(self.coordinates[axis]))

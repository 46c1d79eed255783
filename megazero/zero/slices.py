"""Parameters cut over the ranks before there is an engine: what zero.Init leaves of them."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megazero.comm import Communicator
from megazero.zero.guard import ShardedParameter, placeholder
from megazero.zero.homes import leave, settle


@dataclass(frozen=True)
class Pending:
    """Home of a parameter that is whole, and that ``builder`` is going to cut."""

    builder: Any


_serials = itertools.count()


class Slice:
    """One parameter's values, an equal part of them on every rank; the first rank's count.

    ``builder``: the Init that cut it. ``serial``: the same on every rank, as all cut in one order. ``device``: the
    process's, where the part is and the ranks communicate; ``parameter_device``: where the user has the parameter, and
    its whole values are while it is held, so that what is drawn into it is drawn as without slices.
    """

    def __init__(self, parameter: nn.Parameter, group: Communicator, device: torch.device, builder: Any) -> None:
        self.group, self.builder, self.serial = group, builder, next(_serials)
        self.device, self.parameter_device = device, parameter.device
        self.holders = 0
        self.adopt(parameter, 0)
        self._hide(parameter)

    @property
    def is_being_built(self) -> bool:
        """Whether a use makes the parameter whole, rather than being an error."""
        return self.builder.building

    def adopt(self, parameter: nn.Parameter, source: int) -> None:
        """The parameter is whole, and from here on what it is on the rank ``source``. Every rank calls."""
        flat = parameter.detach().to(self.device).contiguous().view(-1)
        if flat.numel() and self.group.size > 1:
            self.group.broadcast(flat, source)
        self.shape = parameter.shape
        if self.holders > 1:  # who holds it as well sees it too
            parameter.data.copy_(flat.view(self.shape))
        share = -(-flat.numel() // self.group.size)
        own = flat[self.group.rank * share : (self.group.rank + 1) * share]
        self.values = torch.nn.functional.pad(own, (0, share - own.numel())).clone()

    def _hide(self, parameter: nn.Parameter) -> None:
        parameter.data = placeholder(parameter.detach())
        parameter.__class__ = ShardedParameter
        settle(parameter, self)

    def whole(self) -> torch.Tensor:
        """Its values, in its shape, on the process's device. Every rank calls."""
        flat = torch.empty(self.values.numel() * self.group.size, dtype=self.values.dtype, device=self.device)
        if self.group.size == 1:
            flat.copy_(self.values)
        elif flat.numel():
            self.group.all_gather([flat], [self.values]).wait()
        return flat[: self.shape.numel()].view(self.shape)

    def show(self, parameter: nn.Parameter) -> None:
        """Make the parameter whole, for as long as it is held."""
        whole = self.whole().to(self.parameter_device)
        parameter.__class__ = nn.Parameter
        parameter.data = whole

    def hold(self, parameter: nn.Parameter) -> None:
        if not self.holders:
            self.show(parameter)
        self.holders += 1

    def let_go(self, parameter: nn.Parameter) -> None:
        self.holders -= 1
        if not self.holders:
            self._hide(parameter)

    def move(self, parameter: nn.Parameter, device: torch.device) -> bool:
        """Have the parameter on another device, as ``model.to(device)`` asks: the host, or the process's. Whether it is
        one of these."""
        if device.type == self.device.type and device.index in (None, self.device.index):
            device = self.device
        elif device.type != "cpu":
            return False
        self.parameter_device = device
        with torch._C.DisableTorchFunctionSubclass():
            parameter.data = placeholder(parameter.detach(), device)
        return True

    def cast(self, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        self.values = self.values.to(dtype)
        parameter.__class__ = nn.Parameter
        parameter.data = parameter.data.to(dtype)
        self._hide(parameter)

    def duplicate(self, parameter: nn.Parameter) -> nn.Parameter:
        """Another parameter, with the same values."""
        if self.is_being_built:
            self.builder.make_whole([parameter])
            return copy.deepcopy(parameter)
        with torch._C.DisableTorchFunctionSubclass():
            other = nn.Parameter(placeholder(parameter.detach()), parameter.requires_grad)
        place = copy.copy(self)
        place.serial, place.holders, place.values = next(_serials), 0, self.values.clone()
        place._hide(other)
        return other

    def leave(self, parameter: nn.Parameter) -> None:
        """The parameter is a plain one again, its values still here alone."""
        parameter.__class__ = nn.Parameter
        leave(parameter)

    def take(self) -> torch.Tensor:
        """The whole values, which are kept here no longer."""
        whole = self.whole()
        self.values = self.values[:0].clone()
        return whole

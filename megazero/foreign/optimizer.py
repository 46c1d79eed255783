"""Any optimizer of torch's on the parts of the parameters that a rank owns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from megazero.errors import MegazeroError
from megazero.zero.block import Block
from megazero.zero.sharded import ShardedModel


class Part:
    """A stretch of a block's owned range that is one tensor to the optimizer: what of one group a rank owns, or, where
    nothing is cut, one parameter in its own shape."""

    def __init__(self, block: Block, start: int, end: int, shape: Sequence[int]) -> None:
        base = block.owned[0]
        self.block, self.shape = block, tuple(shape)
        self.range = slice(start - base, end - base)
        self.parameter = nn.Parameter(block.master[self.range].view(self.shape))

    def gradient(self) -> torch.Tensor:
        """In the master's dtype; may be written to."""
        return self.block.owned_grad()[self.range].view(self.shape).to(self.parameter.dtype)

    def start(self) -> int:
        return self.block.owned[0] + self.range.start


def parts_of(sharded: ShardedModel, groups: int) -> list[list[Part]]:
    """By optimizer group (named by its index in the layouts), the parts this rank owns."""
    found: list[list[Part]] = [[] for _ in range(groups)]
    for block in sharded.trained:
        if not sharded.sharding.state:
            for entry in block.layout.entries:
                group = (
                    next(int(name) for name, (low, high) in block.layout.groups.items() if low <= entry.start <= high)
                    if entry.spec.numel
                    else None
                )
                if group is not None:
                    # A scalar in one dim, so that its state is told from the scalars that an optimizer keeps.
                    found[group].append(Part(block, entry.start, entry.end, entry.spec.local_shape or (1,)))
            continue
        for name, (start, end) in block.layout.group_ranges(*block.owned).items():
            found[int(name)].append(Part(block, start, end, (end - start,)))
    return found


class ShardOptimizer:
    """Steps a torch optimizer whose groups hold this rank's parts.

    ``optimizer``: its ``param_groups`` keep their options and lose their parameters to the parts. Where torch's kernel
    can skip by a flag on the device (fused Adam and AdamW), a step never waits for the host.
    """

    def __init__(self, sharded: ShardedModel, optimizer: torch.optim.Optimizer, parts: list[list[Part]]) -> None:
        self.sharded, self.optimizer, self.parts = sharded, optimizer, parts
        self.all = [part for group in parts for part in group]
        for group, own in zip(optimizer.param_groups, parts, strict=True):
            group["params"] = [part.parameter for part in own]
        # Some make their state with themselves (Adagrad before torch 2.13): what is of the parts stays.
        own = {part.parameter for part in self.all}
        for parameter in [parameter for parameter in optimizer.state if parameter not in own]:
            del optimizer.state[parameter]
        self._stepping = False
        optimizer.register_step_pre_hook(self._check_caller)
        self.skips_on_device = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and all(
            group.get("fused") for group in optimizer.param_groups
        )

    @torch.no_grad()
    def step(self, factor: torch.Tensor, skip: torch.Tensor) -> None:
        """``factor``: what gradients are multiplied by. ``skip``: float32 scalar, 1 where nothing may change."""
        gradients = [part.gradient() for part in self.all]
        if gradients:
            torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))
        for part, gradient in zip(self.all, gradients, strict=True):
            part.parameter.grad = gradient
        self._stepping = True
        try:
            if self.skips_on_device:
                self.optimizer.found_inf = skip
                self.optimizer.grad_scale = None
                self.optimizer.step()
            elif not bool(skip):
                self.optimizer.step()
        finally:
            self._stepping = False
        for part in self.all:
            part.parameter.grad = None
        for bucket in self.sharded.update_buckets:
            for index in bucket:
                self.sharded.blocks[index].updated()
            self.sharded.gather_bucket(bucket)

    def _check_caller(self, *_: Any) -> None:
        if not self._stepping:
            raise MegazeroError("optimizer.step() would change nothing here; call engine.step() instead")

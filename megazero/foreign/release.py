"""A module out of its engine, for another one, or for none."""

from __future__ import annotations

import torch
from torch import nn

from megazero.zero.homes import leave
from megazero.zero.sharded import ShardedModel
from megazero.zero.slices import Slice


class _Built:
    """In place of the Init that cut a parameter."""

    building = False


@torch.no_grad()
def release_module(sharded: ShardedModel) -> None:
    """Remove the hooks and give parameters memory of their own; those that stage 3 cut are slices over all ranks then,
    block by block, so that no rank holds the model. Called by every rank."""
    for handle in sharded.hooks:
        handle.remove()
    sharded.hooks.clear()
    sharded.forget_gradients()
    for index, block in enumerate(sharded.blocks):
        sharded.hold([index], f"the weights of {block.layout.name}, to let them go")
        values = [view.clone() for view in block.views]
        sharded.let_go([index])
        for parameter, value in zip(block.parameters, values, strict=True):
            leave(parameter)
            if block.sharding.parameters:
                parameter.__class__ = nn.Parameter
            parameter.data = value
            if block.sharding.parameters:
                Slice(parameter, sharded.groups.whole, sharded.device, _Built())

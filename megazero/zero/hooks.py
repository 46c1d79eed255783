"""What tells a ShardedModel that a unit is used: hooks on its modules, and on the graph that they leave behind.

[Note: when a unit's gradients are complete]
An identity on the inputs of a unit's modules has the lowest sequence number of everything the module computes, and
autograd runs gradient accumulation before anything else that is ready; so when the identity's backward runs, the
parameters' gradients are all there. A unit that several modules use, or one module twice, is complete when all their
identities have run. A unit whose inputs need no gradient is complete when backward ends.

[Note: recomputation]
A checkpointed forward runs again inside backward. Its modules' hooks then find the parameters whole, as the outputs'
hooks asked, leave them whole, and count no further use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from megazero.zero.sharded import ShardedModel


class _BackwardReached(torch.autograd.Function):
    """Identity on some tensors; its backward calls ``callback``."""

    @staticmethod
    def forward(ctx, callback, *tensors):
        ctx.callback = callback
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx, *grads):
        ctx.callback()
        return None, *grads


def install_hooks(sharded: ShardedModel) -> None:
    """Hooks on every module that a unit names."""
    for index, unit in enumerate(sharded.units):
        for module in unit.plan.modules:
            module.register_forward_pre_hook(_before(sharded, index), with_kwargs=True)
            if unit.freed:
                module.register_forward_hook(_after(sharded, index))


def _before(sharded: ShardedModel, index: int) -> Callable:
    def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        sharded.enter(index)
        if not torch.is_grad_enabled():
            return None
        return _mark_inputs(args, kwargs, _completion(sharded, index))

    return hook


def _completion(sharded: ShardedModel, index: int) -> Callable[[], Callable[[], None]]:
    def reached(uses: Counter[int]) -> None:
        uses[index] -= 1
        if uses[index] <= 0:
            sharded.unit_complete(index)

    def begin() -> Callable[[], None]:
        uses = sharded.uses
        if not sharded.in_backward:
            uses[index] += 1
        return lambda: reached(uses)

    return begin


def _mark_inputs(args: tuple, kwargs: dict, begin: Callable) -> tuple[tuple, dict] | None:
    leaves, structure = tree_flatten((args, kwargs))
    marked = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.requires_grad]
    callback = begin()  # also where nothing can be marked: a use whose end is not seen keeps the unit open
    if not marked:
        return None
    for i, x in zip(marked, _BackwardReached.apply(callback, *(leaves[i] for i in marked)), strict=True):
        leaves[i] = x
    return tree_unflatten(leaves, structure)


def _after(sharded: ShardedModel, index: int) -> Callable:
    def hook(module: nn.Module, args: tuple, output: Any) -> None:
        if torch.is_grad_enabled():
            for x in tree_leaves(output):
                if isinstance(x, torch.Tensor) and x.requires_grad:
                    x.register_hook(lambda grad: sharded.enter(index) if sharded.in_backward else None)
        sharded.leave(index, module)

    return hook

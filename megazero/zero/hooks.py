"""What tells a ShardedModel that a unit is used: hooks on its modules, and on the graph that they leave behind.

[Note: when a unit's gradients are complete]
Autograd runs gradient accumulation before anything else that is ready, and then what was made last. An input of a
unit's module was made before everything that the module computes; so when the whole gradient of an input is there, the
parameters' gradients are too. A unit that several modules use, or one module twice, is complete when that holds for all
their uses. A unit whose inputs need no gradient is complete when backward ends.

[Note: inputs stay what they are]
What a module is given is watched by a hook and never replaced: a copy, or a view, would change what an operation in
place on it means. Only a leaf, which autograd accumulates into at once, passes an identity first; there, nothing in
place is allowed anyway.

[Note: recomputation]
A checkpointed forward runs again inside backward. Its modules' hooks then find the parameters whole, as the outputs'
hooks asked, leave them whole, and count no further use. Where the first run had no gradients (reentrant checkpointing),
it is counted all the same, and the second one's graph reports its end. Otherwise the input may be the tensor that the
first run was given and has watched: the second one adds nothing to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.hooks import RemovableHandle

from megazero.zero.sharded import ShardedModel

_WATCHING = "_units_watching"
"""Attribute of a tensor: units that are told when its gradient is there."""


class Hook:
    """A module's hook that stays behind where the module is copied or pickled: the copy is in no engine."""

    def __init__(self, call: Callable) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __reduce__(self) -> tuple:
        return _left_behind, ()


def left_behind(*args: Any, **kwargs: Any) -> None:
    """What a copied module has for a Hook."""


def _left_behind() -> Callable:
    return left_behind


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
            _install(sharded, index, module)


def use_in(sharded: ShardedModel, index: int, module: nn.Module) -> None:
    """A unit's parameters are used by one more module."""
    unit = sharded.units[index]
    if module not in unit.plan.modules:
        unit.plan = replace(unit.plan, modules=(*unit.plan.modules, module))
        _install(sharded, index, module)


def watch_inside(sharded: ShardedModel) -> list[RemovableHandle]:
    """Hooks on the modules inside a unit that own its parameters, for a gradient that comes to them by another way than
    through what the unit's module returns: a tensor that it keeps as an attribute, or hands to somebody's hook."""
    handles = []
    for index, unit in enumerate(sharded.units):
        own = {parameter for block in unit.freed for parameter in block.parameters}
        for module in unit.plan.modules if own else ():
            for inner in _uncompiled(module):
                if inner is not module and not own.isdisjoint(inner.parameters(recurse=False)):
                    handles.append(inner.register_forward_hook(Hook(_watch_output(sharded, index))))
    sharded.hooks += handles
    return handles


def _uncompiled(module: nn.Module) -> Iterator[nn.Module]:
    """The modules of a module, save those that a compiled one calls, where hooks would be compiled too."""
    if not hasattr(module, "_torchdynamo_orig_callable") and module._compiled_call_impl is None:
        yield module
        for child in module.children():
            yield from _uncompiled(child)


def move_gradients_at_once(sharded: ShardedModel) -> None:
    """Each gradient goes to its block's buffer as soon as it is there, and not only when those of its unit all are."""
    for index, block in enumerate(sharded.blocks):
        for position, parameter in enumerate(block.parameters if block.trainable else ()):
            ready = partial(sharded.gradient_ready, index, position)
            sharded.hooks.append(parameter.register_post_accumulate_grad_hook(lambda _, ready=ready: ready()))


def _install(sharded: ShardedModel, index: int, module: nn.Module) -> None:
    # First of all: others' hooks may use the parameters (torch.nn.utils.weight_norm computes the weight in one).
    before = Hook(_before(sharded, index))
    sharded.hooks.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
    if sharded.units[index].freed:
        sharded.hooks.append(module.register_forward_hook(Hook(_after(sharded, index))))


def _before(sharded: ShardedModel, index: int) -> Callable:
    def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        sharded.enter(index)
        reached = _completion(sharded, index)
        return _watch_inputs(sharded, index, args, kwargs, reached) if torch.is_grad_enabled() else None

    return hook


def _completion(sharded: ShardedModel, index: int) -> Callable[..., None]:
    """Counts a use of a unit. What to call, once or more, when a backward has passed it; any arguments."""
    uses, last = sharded.uses, -1
    if sharded.in_training_forward:
        uses[index] += 1  # also where nothing can be watched: a use whose end is not seen keeps the unit open

    def reached(*_: Any) -> None:
        nonlocal last
        if not sharded.in_backward or last == sharded.backwards:
            return
        last = sharded.backwards
        uses[index] -= 1
        if uses[index] <= 0:
            sharded.unit_complete(index)

    return reached


def _watch_inputs(
    sharded: ShardedModel, index: int, args: tuple, kwargs: dict, reached: Callable[..., None]
) -> tuple[tuple, dict] | None:
    """The arguments with which the module is to be called instead, None for these."""
    leaves, structure = tree_flatten((args, kwargs))
    watched = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.requires_grad]
    made = [leaves[i] for i in watched if leaves[i].grad_fn is not None]
    for x in made:
        watching = vars(x).setdefault(_WATCHING, set())
        if not (sharded.in_backward and index in watching):
            x.register_hook(reached)
            watching.add(index)
    if made or not watched:
        return None
    for i, x in zip(watched, _BackwardReached.apply(reached, *(leaves[i] for i in watched)), strict=True):
        leaves[i] = x
    return tree_unflatten(leaves, structure)


def _after(sharded: ShardedModel, index: int) -> Callable:
    unit = sharded.units[index]
    watch = _watch_output(sharded, index)

    def hook(module: nn.Module, args: tuple, output: Any) -> Any:
        storages = {block.flat.untyped_storage()._cdata for block in unit.freed}
        if any(_lies_in(x, storages) for x in tree_leaves(output)):
            output = tree_map(lambda x: x.clone() if _lies_in(x, storages) else x, output)
        watch(module, args, output)
        sharded.leave(index, module)
        return output

    return hook


def _lies_in(x: Any, storages: set[int]) -> bool:
    """Whether it is a part of parameters that are about to go: a module may return its weight, or rows of it."""
    return isinstance(x, torch.Tensor) and x.layout is torch.strided and x.untyped_storage()._cdata in storages


def _watch_output(sharded: ShardedModel, index: int) -> Callable:
    """A forward hook: where a gradient comes to what the module returns, backward enters the unit.

    The hook is on the graph's node, where it runs after those of the tensor, which say that the next unit is complete.
    Of a view that is changed in place, autograd goes round the node and to that of the base.
    """

    def hook(module: nn.Module, args: tuple, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        nodes = {}
        for x in _tensors_of(output):
            for y in (x, x._base if x._is_view() else None):
                if y is not None and y.grad_fn is not None:
                    nodes[y.grad_fn] = None
        for node in nodes:
            node.register_prehook(lambda _: sharded.reach(index))

    return hook


def _tensors_of(output: Any) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            for field in fields(leaf):
                yield from _tensors_of(getattr(leaf, field.name))

"""What a user of an engine may not do, each with an error that says what to do instead."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from megazero.errors import MegazeroError
from megazero.foreign.optimizer import ShardOptimizer
from megazero.zero.sharded import ShardedModel

_AGAIN = "call engine.destroy() and then initialize again"


def check_loss(loss: Any) -> None:
    """MegazeroError where ``backward`` cannot take it."""
    if not isinstance(loss, torch.Tensor):
        raise MegazeroError(f"backward: takes the loss as a tensor, not as a {type(loss).__name__}")
    if loss.numel() != 1:
        raise MegazeroError(
            f"backward: takes a loss of one element, not one of shape {tuple(loss.shape)}; take its mean, say"
        )
    if not loss.requires_grad:
        raise MegazeroError(
            "backward: the loss needs no gradient: it was computed under no_grad, or from no trained parameter"
        )


def check_parameters(sharded: ShardedModel, at_step: bool) -> None:
    """MegazeroError where a parameter has a gradient of the user's own, or is frozen or trained since initialize.

    Between steps parameters may be frozen: they have no gradient then.
    """
    with torch._C.DisableTorchFunctionSubclass():  # to ask cut parameters through their class takes eight times as long
        for block in sharded.blocks:
            for entry, parameter in zip(block.layout.entries, block.parameters, strict=True):
                if parameter.grad is not None:
                    raise MegazeroError(
                        f"{entry.name} has a gradient that engine.backward has not made, and that no step would use; "
                        "call engine.backward(loss) instead of loss.backward()"
                    )
                if parameter.requires_grad != block.trainable and (at_step or parameter.requires_grad):
                    was, told = ("trained", "is not to be") if block.trainable else ("frozen", "is to be trained")
                    raise MegazeroError(
                        f"{entry.name} was {was} when initialize was called, and {told} now; set requires_grad before "
                        f"that, or {_AGAIN}"
                    )


def check_groups(optimizer: ShardOptimizer) -> None:
    """MegazeroError where the user has added a group to the optimizer, whose parameters no step would change."""
    if len(optimizer.optimizer.param_groups) != len(optimizer.parts):
        raise MegazeroError(
            "the optimizer has a parameter group that it did not have when initialize was called; give all of them "
            f"there, or {_AGAIN}"
        )


def check_no_others(module: nn.Module, sharded: ShardedModel) -> None:
    """MegazeroError where the module has parameters that the engine has not: they are neither trained nor saved."""
    known = {parameter for block in sharded.blocks for parameter in block.parameters}
    for name, parameter in module.named_parameters():
        if parameter not in known:
            raise MegazeroError(
                f"{name} was added to the model, or put in another's place, after initialize: it is neither trained "
                f"nor saved. Change the model before that, or {_AGAIN}"
            )


def check_scheduler(scheduler: Any, arguments: Mapping[str, Any]) -> None:
    """MegazeroError where its ``step`` cannot be called with these."""
    signature = inspect.signature(scheduler.step)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise MegazeroError(
            f"step: the scheduler has {type(scheduler).__name__}.step{signature}: {error}; give what it takes as "
            'lr_kwargs, such as engine.step(lr_kwargs={"metrics": loss}), or use another scheduler'
        ) from None

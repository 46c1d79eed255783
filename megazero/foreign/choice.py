"""Which parameters are trained, by which optimizer and schedule: the arguments of `initialize`, else the config."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megazero.ds_config import DsConfig, is_elementwise, make_optimizer, make_scheduler
from megazero.errors import ConfigError
from megazero.foreign.optimizer import Part

Groups = list[dict[str, Any]]
Made = Callable[[list[list[Part]]], torch.optim.Optimizer]


def parameter_groups(model: nn.Module, optimizer: Any, model_parameters: Any) -> Groups:
    """The optimizer groups, of those parameters only that require a gradient.

    Raises ConfigError where one that does is in no group or in two, or a group holds what is not the model's.
    """
    field = "model_parameters"
    if isinstance(optimizer, torch.optim.Optimizer):
        field = "optimizer"
        if any(state.get("step", 1) for state in optimizer.state.values()):  # Adagrad has a state before it steps
            told = "has stepped or loaded a state already; give a new one, and load through engine.load_checkpoint"
            raise ConfigError.single(field, told)
        groups = optimizer.param_groups
    else:
        groups = _groups(model.parameters() if model_parameters is None else model_parameters)
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    seen: set[nn.Parameter] = set()
    for index, group in enumerate(groups):
        # Tuples: named_parameters().
        given = group["params"]
        params = [p[1] if isinstance(p, tuple) else p for p in ([given] if isinstance(given, torch.Tensor) else given)]
        for parameter in params:
            if not isinstance(parameter, torch.Tensor):
                raise ConfigError.single(field, f"group {index} holds a {type(parameter).__name__}; give parameters")
            if parameter not in name_of:
                raise ConfigError.single(
                    field,
                    f"group {index} holds a tensor of shape {tuple(parameter.shape)} that is no parameter of the "
                    "model; give model.parameters() of the model given as model=",
                )
            if parameter in seen:
                raise ConfigError.single(field, f"{name_of[parameter]} is there twice; leave it out of one group")
            seen.add(parameter)
        group["params"] = [parameter for parameter in params if parameter.requires_grad]
        group.pop("param_names", None)
    left = [name for parameter, name in name_of.items() if parameter.requires_grad and parameter not in seen]
    if left:
        raise ConfigError.single(
            field,
            f"{len(left)} parameters require a gradient and are in no group, {left[0]} first; add them, or set their "
            "requires_grad to False",
        )
    return groups


def _groups(given: Any) -> Groups:
    """``model_parameters`` as groups, each a new dict with its parameters under ``params``."""
    field = "model_parameters"
    if not isinstance(given, Iterable) or isinstance(given, str | torch.Tensor):
        told = f"is a {type(given).__name__}; give parameters, such as model.parameters(), or a list of groups of them"
        raise ConfigError.single(field, told)
    groups = list(given)
    if not groups or not isinstance(groups[0], dict):
        return [{"params": groups}]
    for index, group in enumerate(groups):
        if not isinstance(group, dict) or "params" not in group:
            what = f"has no params, only {', '.join(map(str, group))}" if isinstance(group, dict) else "is no dict"
            raise ConfigError.single(field, f'group {index} {what}; a group is {{"params": [...], "lr": ...}}')
    return [dict(group) for group in groups]


def choose_optimizer(ds: DsConfig, optimizer: Any, groups: Groups) -> tuple[Made, list[str]]:
    """(what makes the optimizer from each group's parts, what to tell the user)"""

    def filled(parts: list[list[Part]]) -> Groups:
        return [{**group, "params": [part.parameter for part in own]} for group, own in zip(groups, parts, strict=True)]

    told = []
    if optimizer is not None and ds.optimizer is not None:
        told.append(f"the config's optimizer, {ds.optimizer.type}, is not used: initialize was given one")
    if isinstance(optimizer, torch.optim.Optimizer):
        _check_elementwise(ds, optimizer)
        return lambda parts: _fused(optimizer), told
    if callable(optimizer):

        def made(parts: list[list[Part]]) -> torch.optim.Optimizer:
            result = optimizer(filled(parts))
            if not isinstance(result, torch.optim.Optimizer):
                raise ConfigError.single("optimizer", f"made a {type(result).__name__}, not a torch.optim.Optimizer")
            _check_elementwise(ds, result)
            return _fused(result)

        return made, told
    if optimizer is not None:
        kind = type(optimizer).__name__
        raise ConfigError.single("optimizer", f"is a {kind}; give a torch.optim.Optimizer or a function that makes one")
    if ds.optimizer is not None:
        return lambda parts: _fused(make_optimizer(ds.optimizer, filled(parts))), told
    told.append("no optimizer is given, here or in the config: AdamW with lr 1e-3 and torch's other defaults")
    return lambda parts: _fused(torch.optim.AdamW(filled(parts))), told


def _check_elementwise(ds: DsConfig, optimizer: torch.optim.Optimizer) -> None:
    stage, name = ds.zero.stage, type(optimizer).__name__
    if stage and not is_elementwise(optimizer) and not ds.zero_allow_untested_optimizer:
        raise ConfigError.single(
            "zero_optimization.stage",
            f"{stage} gives the optimizer slices of tensors, and {name} needs whole ones or is not known not to; use "
            "stage 0, or Adam, AdamW, SGD, Lion, Adagrad or another element-wise one, or set "
            "zero_allow_untested_optimizer if you know that it is one",
        )


def _fused(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Where torch has a kernel that skips a step by a flag on the device, that one, unless another is asked for."""
    for group in optimizer.param_groups if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) else ():
        if group.get("fused") is None and not group.get("foreach"):
            group["fused"] = not group.get("differentiable", False)
    return optimizer


def choose_scheduler(ds: DsConfig, given: Any, optimizer: torch.optim.Optimizer | None) -> tuple[Any, list[str]]:
    """(the scheduler, None for none; what to tell the user)"""
    if given is None:
        if ds.scheduler is None or optimizer is None:
            return None, []
        return make_scheduler(ds.scheduler, optimizer), []
    told = []
    if ds.scheduler is not None:
        told.append(f"the config's scheduler, {ds.scheduler.type}, is not used: initialize was given one")
    scheduler = given
    if not hasattr(given, "step") or isinstance(given, type):
        if not callable(given):
            kind = type(given).__name__
            raise ConfigError.single("lr_scheduler", f"is a {kind}; give a scheduler or a function that makes one")
        scheduler = given(optimizer)
    own = getattr(scheduler, "optimizer", optimizer)
    if own is not optimizer:
        raise ConfigError.single(
            "lr_scheduler",
            "sets the rates of another optimizer than the engine's; give its optimizer as optimizer=, or instead of "
            "the scheduler a function: lambda optimizer: ...",
        )
    return scheduler, told


def group_names(model: nn.Module, groups: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Name of each parameter that is trained → the index of its optimizer group, spelled out."""
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    return {name_of[parameter]: str(index) for index, group in enumerate(groups) for parameter in group["params"]}

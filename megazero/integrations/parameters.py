"""What DeepSpeed's users and libraries do with parameters that stage 3 cuts, beyond `megazero.zero`."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megazero import zero
from megazero.ds_config.reader import load_ds_config
from megazero.errors import MegazeroError
from megazero.integrations.deepspeed import init_distributed
from megazero.zero.homes import InEngine, home_of


class ZeroParamStatus(Enum):
    """Whether a parameter's values are all on this process."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class Init(zero.Init):
    """`megazero.zero.Init` with the arguments of DeepSpeed's, and its dtype: that of the config's fp16 or bf16. Where
    values are kept follows from the config."""

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: dict[str, Any] | str | Path | None = None,
        config: dict[str, Any] | str | Path | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        **others: Any,
    ) -> None:
        if module is not None or data_parallel_group is not None or others:
            given = [*(["module"] if module is not None else []), *others] or ["data_parallel_group"]
            raise MegazeroError(
                f"deepspeed.zero.Init: megazero takes no {given[0]}; build the model inside `with "
                "deepspeed.zero.Init(config_dict_or_path=...):`, or give it whole to initialize, which cuts it"
            )
        if enabled:
            init_distributed()
        given = config_dict_or_path if config_dict_or_path is not None else config
        if dtype is None and enabled and given is not None:
            dtype = _dtype_of(load_ds_config(given))
        super().__init__(given, enabled=enabled, dtype=dtype)


def _dtype_of(settings: dict[str, Any]) -> torch.dtype | None:
    """What fp16 and bf16 say; None: parameters stay in the dtype that they are made in."""
    for name, dtype in (("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16), ("fp16", torch.float16)):
        section = settings.get(name)
        if isinstance(section, dict) and section.get("enabled") is True:
            return dtype
    return None


class OnDevice:
    """Modules built inside have their parameters in ``dtype`` on ``device``."""

    def __init__(self, dtype: torch.dtype, device: str = "meta", enabled: bool = True) -> None:
        self._dtype, self._device, self._enabled = dtype, torch.device(device), enabled

    def __enter__(self) -> None:
        if self._enabled:
            self._before = torch.get_default_dtype()
            torch.set_default_dtype(self._dtype)
            self._device.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._enabled:
            self._device.__exit__(*error)
            torch.set_default_dtype(self._before)


def zero_wrapper_for_fp_tensor_constructor(function: Callable, *args: Any, **kwargs: Any) -> Callable:
    """DeepSpeed's Init wraps torch's constructors in this; ours wraps none, so whoever replaces it changes nothing."""
    return function


def is_zero_param(parameter: nn.Parameter) -> bool:
    """Whether stage 3 has it."""
    home = home_of(parameter)
    return home is not None and not (isinstance(home, InEngine) and not home.sharded.sharding.parameters)


def set_z3_leaf_modules(model: nn.Module, classes: list[type]) -> list[nn.Module]:
    """The modules of these classes; parameters are gathered by block here, so none needs to be told."""
    return [module for module in model.modules() if type(module) in classes]


unset_z3_leaf_modules = set_z3_leaf_modules


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """None: see `set_z3_leaf_modules`."""
    return []


class _NoModule(nn.Module):
    def ds_external_parameters(self) -> tuple:
        return ()


class _ParameterOffload:
    """What trl takes out of and puts back into a stage 3 engine around generation with gathered parameters: hooks.
    Ours stay, as a gathered block needs none taken out."""

    def __init__(self) -> None:
        self.module, self.forward_hooks, self.backward_hooks = _NoModule(), [], []

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """Nothing was taken out."""


def describe(optimizer: torch.optim.Optimizer, stage: int) -> None:
    """The attributes by which libraries look into DeepSpeed's optimizers: the masters, and stage 3's hooks."""
    optimizer.single_partition_of_fp32_groups = [p for group in optimizer.param_groups for p in group["params"]]
    if stage == 3:
        optimizer.parameter_offload = _ParameterOffload()


def mark(model: nn.Module) -> None:
    """The attributes by which libraries tell the parameters of a stage 3 engine. A status of not available makes them
    gather, which costs nothing where the values are there."""
    for number, parameter in enumerate(model.parameters()):
        parameter.ds_id, parameter.ds_status = number, ZeroParamStatus.NOT_AVAILABLE
        parameter.ds_shape, parameter.ds_numel = parameter.shape, parameter.numel()

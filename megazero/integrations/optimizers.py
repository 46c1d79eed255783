"""DeepSpeed's optimizers and schedules by name: torch's, which the engine runs on flat shards."""

from __future__ import annotations

from typing import Any

import torch

from megazero.ds_config.optimizers import Lion
from megazero.ds_config.schedulers import SCHEDULES
from megazero.errors import MegazeroError

VALID_LR_SCHEDULES = list(SCHEDULES)


class AsyncIOBuilder:
    """By its name tests ask whether NVMe offload can be had through DeepSpeed's own kernels."""

    NAME = "async_io"


__compatible_ops__ = {AsyncIOBuilder.NAME: False}


def _adam(params: Any, decoupled: bool, others: dict[str, Any], **options: Any) -> torch.optim.Optimizer:
    params = list(params)
    if any(isinstance(group, dict) and _is_of_another(group) for group in params):
        raise MegazeroError(
            "the optimizer is not Adam, and accelerate replaces every optimizer by DeepSpeedCPUAdam under "
            "zero_optimization.offload_optimizer; to train with yours, set zero_force_ds_cpu_optimizer to false in the "
            "ds_config"
        )
    for name, only in (("bias_correction", True), ("fp32_optimizer_states", True)):
        if others.pop(name, only) != only:
            raise ValueError(f"{name}={not only}: megazero does not have it; leave it out")
    others.pop("set_grad_none", None)
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    return kind(params, **options, **others)


def _is_of_another(group: dict[str, Any]) -> bool:
    """Whether it is a group of an optimizer's other than Adam and AdamW, with its options."""
    lacks = "differentiable" in group and not {"betas", "eps", "amsgrad"} <= group.keys()  # one of torch's own
    return lacks or "momentum" in group or isinstance(group.get("eps"), tuple)


def DeepSpeedCPUAdam(  # noqa: N802
    model_params: Any,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    adamw_mode: bool = True,
    **others: Any,
) -> torch.optim.Optimizer:
    """torch's AdamW, or Adam where ``adamw_mode`` is false."""
    options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
    return _adam(model_params, adamw_mode, others, **options)


def FusedAdam(  # noqa: N802
    params: Any,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    adam_w_mode: bool = True,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    **others: Any,
) -> torch.optim.Optimizer:
    """torch's AdamW, or Adam where ``adam_w_mode`` is false."""
    options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
    return _adam(params, adam_w_mode, others, **options)


def DeepSpeedCPUAdagrad(  # noqa: N802
    model_params: Any, lr: float = 1e-2, eps: float = 1e-10, weight_decay: float = 0.0, **others: Any
) -> torch.optim.Optimizer:
    """torch's Adagrad."""
    for name in ("amsgrad", "fp32_optimizer_states", "adamw_mode"):  # the last is accelerate's
        others.pop(name, None)
    return torch.optim.Adagrad(model_params, lr=lr, eps=eps, weight_decay=weight_decay, **others)


def DeepSpeedCPULion(  # noqa: N802
    model_params: Any,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    **others: Any,
) -> torch.optim.Optimizer:
    """megazero's Lion."""
    others.pop("fp32_optimizer_states", None)
    others.pop("set_grad_none", None)
    return Lion(model_params, lr=lr, betas=betas, weight_decay=weight_decay, **others)

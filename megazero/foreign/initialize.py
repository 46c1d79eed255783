"""`megazero.initialize`: from a user's module and a ds_config to an engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from megazero.ds_config import DsConfig, is_elementwise, make_optimizer, make_scheduler, read_ds_config
from megazero.engine import device_of, start_process_group
from megazero.errors import ConfigError
from megazero.foreign.engine import ZeroEngine
from megazero.foreign.optimizer import ShardOptimizer, group_names, parts_of
from megazero.foreign.units import foreign_units
from megazero.launch.environment import ProcessEnvironment, process_environment
from megazero.layout import Layout
from megazero.topology import Topology
from megazero.zero.guard import ShardedParameter
from megazero.zero.hooks import install_hooks
from megazero.zero.sharded import DataParallel, ShardedModel, ZeroSettings, data_parallel

TIMEOUT = 1800
"""Seconds that a collective waits for a rank."""


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Iterable], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None = None,
    training_data: Dataset | None = None,
    lr_scheduler: Any = None,
    topology: Topology | None = None,
    collate_fn: Callable | None = None,
    config: Mapping[str, Any] | str | Path | None = None,
    config_params: Mapping[str, Any] | str | Path | None = None,
) -> tuple[ZeroEngine, torch.optim.Optimizer | None, DataLoader | None, Any]:
    """(engine, optimizer, dataloader, scheduler) of a model under ZeRO, as DeepSpeed's function of this name.

    Args:
        args: an object whose ``deepspeed_config`` is the config's path, where neither of the config arguments is given.
        model: on any device; its parameters move to this process's. Every rank gets rank 0's values.
        optimizer: an object over the model's parameters, or a function that makes one from them; unset: the config's,
            else torch's AdamW.
        model_parameters: those to train, or groups of them; unset: all that require a gradient.
        training_data: a dataset, of which each process gets its own samples from the dataloader returned.
        lr_scheduler: an object over ``optimizer``, or a function that makes one from it; unset: the config's, if any.
        topology: where the processes are not all data-parallel ones.
        config, config_params: a ds_config, as a mapping or a JSON file's path; two names for one thing.

    The process group is started where there is none. Raises ConfigError with every problem of the config.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError.single("model", f"is a {type(model).__name__}; give the torch.nn.Module to train")
    environment = _environment()
    if topology is None:
        device = device_of(environment)
        start_process_group(environment, device, TIMEOUT)
        topology = Topology(Layout(dp=environment.world_size), environment.rank, device)
    ds = read_ds_config(_config_source(args, config, config_params), topology.layout.dp)
    if ds.seed is not None:
        torch.manual_seed(ds.seed)
    groups = _parameter_groups(model, optimizer, model_parameters)
    chosen, messages = _optimizer(ds, optimizer, groups)
    sharded = shard(model, ds, topology, group_names(model, groups))
    install_hooks(sharded)
    shards = None
    if sharded.trained:
        parts = parts_of(sharded, len(groups))
        shards = ShardOptimizer(sharded, chosen(parts), parts)
    engine = ZeroEngine(model, sharded, shards, ds, topology, environment.local_rank)
    engine.lr_scheduler = _scheduler(ds, lr_scheduler, engine.optimizer)
    loader = _dataloader(ds, training_data, topology, collate_fn)
    if topology.rank == 0:
        for message in (*messages, *_said(ds)):
            print(f"megazero: {message}", flush=True)
    return engine, engine.optimizer, loader, engine.lr_scheduler


def _environment() -> ProcessEnvironment:
    """As the launcher says, or the process group that the user has started."""
    if not dist.is_initialized():
        return process_environment()
    rank = dist.get_rank()
    local_rank = os.environ.get("LOCAL_RANK", rank % max(1, torch.cuda.device_count()))
    return ProcessEnvironment(rank, int(local_rank), dist.get_world_size())


def _config_source(args: Any, config: Any, config_params: Any) -> Any:
    given = [source for source in (config, config_params) if source is not None]
    if not given and getattr(args, "deepspeed_config", None):
        given = [args.deepspeed_config]
    if len(given) != 1:
        how = "both config and config_params are given; give one" if given else "none is given; pass config="
        raise ConfigError.single("config", f"{how}, a mapping or the path of a ds_config.json")
    return given[0]


def _parameter_groups(model: nn.Module, optimizer: Any, model_parameters: Any) -> list[dict[str, Any]]:
    """Groups of the parameters to train. Marks what is in none as frozen."""
    if isinstance(optimizer, torch.optim.Optimizer):
        groups = optimizer.param_groups
    else:
        given = list(model.parameters() if model_parameters is None else model_parameters)
        if given and isinstance(given[0], dict):
            groups = [{**group, "params": list(group["params"])} for group in given]
        elif given and isinstance(given[0], tuple):  # named_parameters()
            groups = [{"params": [parameter for _, parameter in given]}]
        else:
            groups = [{"params": given}]
    for group in groups:
        group["params"] = [parameter for parameter in group["params"] if parameter.requires_grad]
    trained = {parameter for group in groups for parameter in group["params"]}
    left = [
        name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter not in trained
    ]
    if left:
        raise ConfigError.single(
            "optimizer" if isinstance(optimizer, torch.optim.Optimizer) else "model_parameters",
            f"{len(left)} parameters require a gradient and are in no group, {left[0]} first; add them, or set their "
            "requires_grad to False",
        )
    return groups


def _optimizer(
    ds: DsConfig, optimizer: Any, groups: list[dict[str, Any]]
) -> tuple[Callable[[list], torch.optim.Optimizer], list[str]]:
    """(what makes the optimizer from each group's parts, what to tell the user)"""
    stage = ds.zero.stage

    def filled(parts: list) -> list[dict[str, Any]]:
        return [{**group, "params": [part.parameter for part in own]} for group, own in zip(groups, parts, strict=True)]

    def refuse(name: str) -> None:
        raise ConfigError.single(
            "zero_optimization.stage",
            f"{stage} gives the optimizer slices of tensors, and {name} needs whole ones or is not known not to; use "
            "stage 0, or Adam, AdamW, SGD, Lion, Adagrad or another element-wise one",
        )

    if isinstance(optimizer, torch.optim.Optimizer):
        if stage and not is_elementwise(optimizer):
            refuse(type(optimizer).__name__)
        for group in optimizer.param_groups:
            _prefer_fused(type(optimizer), group)
        return lambda parts: optimizer, []
    if callable(optimizer):

        def made(parts: list) -> torch.optim.Optimizer:
            result = optimizer(filled(parts))
            if stage and not is_elementwise(result):
                refuse(type(result).__name__)
            return result

        return made, []
    if ds.optimizer is not None:
        if stage and ds.optimizer.whole_tensors:
            refuse(ds.optimizer.type)
        return lambda parts: _fused(make_optimizer(ds.optimizer, filled(parts))), []
    said = "no optimizer is given, here or in the config: AdamW with lr 1e-3 and torch's other defaults"
    return lambda parts: torch.optim.AdamW(filled(parts), fused=True), [said]


def _prefer_fused(kind: type, group: dict[str, Any]) -> None:
    if kind in (torch.optim.Adam, torch.optim.AdamW) and group.get("fused") is None and not group.get("foreach"):
        group["fused"] = not group.get("differentiable", False)


def _fused(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        _prefer_fused(type(optimizer), group)
    return optimizer


def shard(model: nn.Module, ds: DsConfig, topology: Topology, groups: Mapping[str, str]) -> ShardedModel:
    """The model's parameters in blocks on this process's device, with rank 0's values."""
    zero, precision, device = ds.zero, ds.precision, topology.device
    dp = data_parallel(topology, max(0, zero.mics_shard_size), zero.zero_hpz_partition_size, TIMEOUT)
    _move_buffers(model, device, dp)
    dtypes = {
        name: precision.dtype if parameter.is_floating_point() else parameter.dtype
        for name, parameter in model.named_parameters()
    }
    half = any(dtype.itemsize < 4 for dtype in dtypes.values())

    def value_of(name: str, parameter: nn.Parameter) -> torch.Tensor:
        value = parameter.detach().to(device, copy=True)
        if dp.whole.size > 1 and value.numel():
            dp.whole.broadcast(value)
        return value

    return ShardedModel(
        model,
        foreign_units(model),
        dp,
        ZeroSettings(
            stage=zero.stage,
            reduce_bucket_size=zero.reduce_bucket_size,
            allgather_bucket_size=zero.allgather_bucket_size,
            prefetch_bucket_size=zero.stage3_prefetch_bucket_size,
            persistence_threshold=zero.stage3_param_persistence_threshold,
            max_live_parameters=zero.stage3_max_live_parameters,
            overlap=zero.overlap_comm,
        ),
        dtypes=dtypes,
        grad_dtype=precision.grad_dtype if half else torch.float32,
        device=device,
        group_of=lambda name, spec: groups.get(name, "frozen"),
        value_of=value_of,
        guard=ShardedParameter,
    )


def _move_buffers(model: nn.Module, device: torch.device, dp: DataParallel) -> None:
    """Buffers keep their dtype: a rotary frequency in 16 bits would be another one."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            value = buffer.to(device)
            if dp.whole.size > 1 and value.numel():
                value = value.contiguous()
                dp.whole.broadcast(value)
            setattr(module, name, value)


def _scheduler(ds: DsConfig, given: Any, optimizer: torch.optim.Optimizer | None) -> Any:
    if given is not None:
        is_object = hasattr(given, "step") and not isinstance(given, type)
        return given if is_object else given(optimizer)
    if ds.scheduler is None or optimizer is None:
        return None
    return make_scheduler(ds.scheduler, optimizer)


def _dataloader(ds: DsConfig, data: Any, topology: Topology, collate_fn: Callable | None) -> DataLoader | None:
    if data is None:
        return None
    if not hasattr(data, "__getitem__"):
        raise ConfigError.single("training_data", "must be a dataset with __len__ and __getitem__")
    rank, size = topology.coordinates["dp"], topology.layout.dp
    sampler = DistributedSampler(data, num_replicas=size, rank=rank, seed=ds.seed or 0)
    return DataLoader(
        data,
        batch_size=ds.train_micro_batch_size_per_gpu,
        sampler=sampler,
        collate_fn=collate_fn,
        drop_last=ds.dataloader_drop_last,
        pin_memory=topology.device.type == "cuda",
    )


def _said(ds: DsConfig) -> list[str]:
    """What of the config the user should know about."""
    dtype = str(ds.precision.dtype).removeprefix("torch.")
    lines = [
        f"ZeRO stage {ds.zero.stage}, {dtype}, micro-batch {ds.train_micro_batch_size_per_gpu} x "
        f"{ds.gradient_accumulation_steps} accumulation steps, {ds.train_batch_size} samples per step"
    ]
    if ds.deferred:
        lines.append(f"left to the defaults: {', '.join(ds.deferred)}")
    if ds.not_needed:
        lines.append(f"not needed here, and without effect: {', '.join(ds.not_needed)}")
    return lines

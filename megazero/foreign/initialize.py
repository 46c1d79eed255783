"""`megazero.initialize`: from a user's module and a ds_config to an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset

from megazero.ds_config import DsConfig, read_ds_config
from megazero.ds_config.reader import load_ds_config
from megazero.errors import ConfigError
from megazero.foreign.buffers import move_buffers
from megazero.foreign.choice import choose_optimizer, choose_scheduler, group_names, parameter_groups
from megazero.foreign.comms_log import CommsLog
from megazero.foreign.data import make_loader
from megazero.foreign.engine import ZeroEngine
from megazero.foreign.optimizer import ShardOptimizer, parts_of
from megazero.foreign.pipe.engine import PipelineEngine
from megazero.foreign.pipe.module import PipelineModule
from megazero.foreign.release import release_module
from megazero.foreign.reports import Reports
from megazero.foreign.start import own_environment, start_topology, timeout_of
from megazero.foreign.units import foreign_units
from megazero.planner.memory import describe_host
from megazero.sharding import Replication
from megazero.topology import Topology
from megazero.zero.blocks import Unit
from megazero.zero.groups import data_parallel
from megazero.zero.guard import Guard
from megazero.zero.homes import InEngine, home_of, settle_model
from megazero.zero.hooks import install_hooks, move_gradients_at_once, watch_inside
from megazero.zero.settings import ZeroSettings
from megazero.zero.sharded import ShardedModel
from megazero.zero.slices import Slice


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
        model: on any device; its parameters move to this process's. Every rank gets rank 0's values. A PipelineModule
            gives a PipelineEngine.
        optimizer: an object over the model's parameters, or a function that makes one from them; unset: the config's,
            else torch's AdamW.
        model_parameters: those to train, or groups of them; unset: all that require a gradient.
        training_data: a dataset, of which each process gets its own samples from the dataloader returned.
        lr_scheduler: an object over ``optimizer``, or a function that makes one from it; unset: the config's, if any.
        topology: where the processes are not all data-parallel ones; a PipelineModule has its own.
        config, config_params: a ds_config, as a mapping or a JSON file's path; two names for one thing.

    The process group is started where there is none. Raises ConfigError with every problem of the config.
    """
    _check_model(model)
    environment = own_environment()
    topology = _topology(model, topology)
    given = load_ds_config(_config_source(args, config, config_params))
    ds = read_ds_config(given, topology.layout.dp)
    if isinstance(model, PipelineModule) and ds.pipeline.activation_checkpoint_interval:
        model.activation_checkpoint_interval = ds.pipeline.activation_checkpoint_interval
    if ds.seed is not None:
        torch.manual_seed(ds.seed)
    groups = parameter_groups(model, optimizer, model_parameters)
    chosen, messages = choose_optimizer(ds, optimizer, groups)
    messages += _leave_earlier_engine(model)
    if any(parameter.grad is not None for parameter in model.parameters()):
        messages.append("the model has gradients, which are forgotten")
        model.zero_grad()
    loader = make_loader(training_data, ds, topology, collate_fn)
    reports = Reports(ds, topology)
    messages += _said(model, ds)
    sharded = shard(model, ds, topology, group_names(model, groups), reports.comms)
    install_hooks(sharded)
    inside = watch_inside(sharded)
    if ds.zero.contiguous_gradients:
        move_gradients_at_once(sharded)
    shards = None
    kind = PipelineEngine if isinstance(model, PipelineModule) else ZeroEngine
    if sharded.trained or kind is PipelineEngine:  # other stages train: groups and rates are there, without a parameter
        parts = parts_of(sharded, len(groups))
        shards = ShardOptimizer(sharded, chosen(parts), parts)
    engine = kind(model, sharded, shards, ds, topology, environment.local_rank, reports, inside)
    engine.config = given
    settle_model(sharded, engine)
    engine.lr_scheduler, more = choose_scheduler(ds, lr_scheduler, engine.optimizer)
    engine.training_dataloader = loader
    if sharded.tier is not None:
        more = [*more, *sharded.tier.notes(), describe_host(sharded.tier.planned)]
    for message in (*messages, *more):
        reports.say(message)
    reports.start()
    return engine, engine.optimizer, loader, engine.lr_scheduler


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError.single("model", f"is a {type(model).__name__}; give the torch.nn.Module to train")
    if isinstance(model, ZeroEngine):
        raise ConfigError.single("model", "is an engine; give the module in it, engine.module")
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(value):
            told = f"{name} has no shape yet, as its module is a lazy one; run the model on one batch first"
            raise ConfigError.single("model", told)
    places: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or home_of(parameter) is not None:
            continue
        told = None
        if parameter.is_complex():
            told = f"{name} is {parameter.dtype}, and is trained in float32; keep it as torch.view_as_real of it"
        elif parameter.is_inference():
            told = f"{name} was made under torch.inference_mode, where nothing can be trained; make the model outside"
        elif parameter.numel() and not parameter.is_meta and parameter.layout is torch.strided:
            other = places.setdefault(parameter.data_ptr(), name)
            if other != name:  # an update would part them
                told = f"{other} and {name} are two parameters in one place in memory; let one module have the other's"
        if told is not None:
            raise ConfigError.single("model", told)


def _leave_earlier_engine(model: nn.Module) -> list[str]:
    """Out of the engine that has its parameters; what to say of it. ConfigError where that has others as well."""
    homes = {name: home_of(parameter) for name, parameter in model.named_parameters()}
    found: dict[ShardedModel, str] = {}
    for name, home in homes.items():
        if isinstance(home, InEngine):
            found.setdefault(home.sharded, name)
    for sharded, name in found.items():
        if {parameter for _, parameter in sharded.named_parameters()} != set(model.parameters()):
            raise ConfigError.single(
                "model",
                f"{name} is in the engine of another model; make one model of both, for one engine, or call destroy() "
                "of that engine first",
            )
        engine = homes[name].engine() if homes[name].engine is not None else None
        if engine is not None:
            engine.destroy()
        else:  # nobody keeps it
            release_module(sharded)
    return ["the model was in an engine, which is destroyed"] if found else []


def _topology(model: nn.Module, given: Topology | None) -> Topology:
    own = model.topology if isinstance(model, PipelineModule) else None
    if own is not None and given not in (None, own):
        raise ConfigError.single("topology", "is another than the PipelineModule's; give it to that alone")
    return given or own or start_topology()


def _config_source(args: Any, config: Any, config_params: Any) -> Any:
    given = [source for source in (config, config_params) if source is not None]
    if not given and getattr(args, "deepspeed_config", None):
        given = [args.deepspeed_config]
    if len(given) != 1:
        how = "both config and config_params are given; give one" if given else "none is given; pass config="
        raise ConfigError.single("config", f"{how}, a mapping or the path of a ds_config.json")
    return given[0]


def shard(
    model: nn.Module, ds: DsConfig, topology: Topology, groups: Mapping[str, str], log: CommsLog | None = None
) -> ShardedModel:
    """The model's parameters in blocks on this process's device, with rank 0's values. ``log``: of collectives."""
    zero, precision, device = ds.zero, ds.precision, topology.device
    dp = data_parallel(topology, max(0, zero.mics_shard_size), zero.zero_hpz_partition_size, timeout_of(device))
    if log is not None:
        dp = log.wrap_all(dp, topology)
    move_buffers(model, device, dp, precision.buffer_dtype)
    dtypes = {
        name: precision.dtype if parameter.is_floating_point() else parameter.dtype
        for name, parameter in model.named_parameters()
    }
    half = any(dtype.itemsize < 4 for dtype in dtypes.values())

    def source_of(name: str, parameter: nn.Parameter) -> Callable[[], torch.Tensor]:
        home = home_of(parameter)
        if isinstance(home, Slice):
            home.leave(parameter)
            return home.take
        if parameter.is_meta:
            raise ConfigError.single("model", f"{name} is on the meta device, without values; load the weights first")
        value = parameter.detach()

        def first_rank_s() -> torch.Tensor:
            moved = value.to(device, copy=True).contiguous()
            if dp.whole.size > 1 and moved.numel():
                dp.whole.broadcast(moved)
            return moved

        return first_rank_s

    return ShardedModel(
        model,
        _units(model),
        dp,
        ZeroSettings.of(zero, overlap=zero.overlap_comm),
        dtypes=dtypes,
        grad_dtype=precision.grad_dtype if half else torch.float32,
        device=device,
        group_of=lambda name, spec: groups.get(name, "frozen"),
        source_of=source_of,
        guard=Guard(),
    )


def _units(model: nn.Module) -> list[Unit]:
    """Gradients of what several stages hold are sums over them."""
    tied = model.tied if isinstance(model, PipelineModule) else {}
    units = foreign_units(model)
    for name, stages in tied.items():
        both = Replication("pp", stages, "partial")
        units = [
            replace(unit, specs={n: s.replicated_over(both) for n, s in unit.specs.items()})
            if next(iter(unit.specs)).startswith(f"{name}.")
            else unit
            for unit in units
        ]
    return units


def _said(model: nn.Module, ds: DsConfig) -> list[str]:
    """What of the config the user should know about."""
    dtype = ds.precision.dtype
    clip = f"gradients clipped to a norm of {ds.gradient_clipping:g}" if ds.gradient_clipping else "no clipping"
    lines = [
        f"ZeRO stage {ds.zero.stage}, {_short(dtype)}, micro-batch {ds.train_micro_batch_size_per_gpu} x "
        f"{ds.gradient_accumulation_steps} accumulation steps, {ds.train_batch_size} samples per step, {clip}"
    ]
    others = {_short(p.dtype) for p in model.parameters() if p.is_floating_point() and p.dtype != dtype}
    if others and dtype == torch.float32:
        lines.append(
            f"the model's {' and '.join(sorted(others))} parameters become float32, as the config enables neither bf16 "
            "nor fp16"
        )
    if ds.deferred:
        lines.append(f"left to the defaults: {', '.join(ds.deferred)}")
    if ds.not_needed:
        lines.append(f"not needed here, and without effect: {', '.join(ds.not_needed)}")
    return lines


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

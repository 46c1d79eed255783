"""As planner.dry_run, for adapters: transformers' model and peft's adapters under `megazero.initialize`'s engine."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn

from megazero.config import Config
from megazero.convert.configs import choose_family, write_config
from megazero.ds_config import read_ds_config
from megazero.foreign.engine import ZeroEngine
from megazero.foreign.optimizer import Part, ShardOptimizer, parts_of
from megazero.foreign.reports import Reports
from megazero.foreign.units import foreign_units
from megazero.models.config import ModelConfig
from megazero.planner.adapters import TARGETS, adapter_buffers, adapter_state, adapter_traffic
from megazero.planner.dry_run import Account, CollectiveCounter, Held, alone
from megazero.topology import Topology
from megazero.zero.groups import data_parallel
from megazero.zero.guard import Guard
from megazero.zero.hooks import install_hooks, move_gradients_at_once, watch_inside
from megazero.zero.settings import ZeroSettings
from megazero.zero.sharded import ShardedModel


def adapters_planned(config: Config, world_size: int, rank: int, lora_rank: int) -> Account:
    """What the planner says of one process."""
    layout = config.layout(world_size)
    buffers = adapter_buffers(config, config.model.architecture, lora_rank, layout.dp)
    return Account(adapter_state(config, buffers, rank).total, adapter_traffic(config, buffers, layout))


def adapters_dry_run(config: Config, world_size: int, rank: int, lora_rank: int) -> Account:
    """What a process holds and sends, counted: of two steps the second. Moments are those of the optimizer's parts.

    Raises LaunchError where this process is in a process group already.
    """
    layout, size, length = config.layout(world_size), config.train.micro_batch_size, config.data.seq_length
    with alone(rank, world_size):
        topology, counter = Topology(layout, rank, torch.device("meta")), CollectiveCounter(layout, rank)
        model = adapted(config.model.architecture, lora_rank, config.train.recompute == "full")
        engine = _engine(model, config, topology)
        tokens = torch.empty(size, length, dtype=torch.int64, device="meta")
        mask = torch.empty(size, 1, length, length, dtype=torch.bool, device="meta")
        for _ in range(2):
            counter.traffic.clear()
            held = Held(engine.sharded)
            with counter:
                for _ in range(config.micro_batches(layout.dp)):
                    loss = engine(input_ids=tokens, labels=tokens, attention_mask=mask, use_cache=False).loss
                    engine.backward(loss)
                    if engine.is_gradient_accumulation_boundary():
                        engine.sharded.finish_gradients()
                        held.look()
                    engine.step()
        moments = sum(2 * 4 * part.parameter.numel() for part in engine.shard_optimizer.all)
        traffic = Counter({route: count for route, count in counter.traffic.items() if count})
        return Account(held.bytes + moments, traffic)


def adapted(model: ModelConfig, rank: int, recomputes: bool) -> nn.Module:
    """transformers' model of this architecture with peft's adapters, on the meta device."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    family, completed = choose_family(model)
    found = write_config(family, completed, "bfloat16", {})
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(AutoConfig.for_model(found.pop("model_type"), **found))
        if recomputes:
            made.gradient_checkpointing_enable({"use_reentrant": False})
        targets = [f"{target}_proj" for target in TARGETS]
        return get_peft_model(made, LoraConfig(r=rank, target_modules=targets))


def _engine(model: nn.Module, config: Config, topology: Topology) -> ZeroEngine:
    """As `foreign.initialize` makes it, but that nothing has values."""
    settings: dict[str, Any] = {
        "train_batch_size": config.train.global_batch_size,
        "train_micro_batch_size_per_gpu": config.train.micro_batch_size,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": config.zero.stage,
            "stage3_param_persistence_threshold": config.zero.stage3_param_persistence_threshold,
        },
        "steps_per_print": 1 << 30,
    }
    ds = read_ds_config(settings, topology.layout.dp)
    sharded = ShardedModel(
        model,
        foreign_units(model),
        data_parallel(topology, 0, 0, 60.0),
        ZeroSettings.of(ds.zero, overlap=True),
        dtypes=dict.fromkeys((name for name, _ in model.named_parameters()), torch.bfloat16),
        grad_dtype=torch.float32,
        device=topology.device,
        group_of=lambda name, spec: "0",
        guard=Guard(),
    )
    install_hooks(sharded)
    inside = watch_inside(sharded)
    move_gradients_at_once(sharded)
    parts = parts_of(sharded, 1)
    optimizer = torch.optim.AdamW([{"params": [part.parameter for part in parts[0]]}])
    shards = ShardOptimizer(sharded, _begun(optimizer, parts[0]), parts)
    return ZeroEngine(model, sharded, shards, ds, topology, 0, Reports(ds, topology), inside)


def _begun(optimizer: torch.optim.AdamW, parts: list[Part]) -> torch.optim.AdamW:
    """With the state of a first step, which torch's fused kernel makes on known devices only."""
    for group in optimizer.param_groups:
        group["fused"] = True
    for part in parts:
        moments = {name: torch.zeros_like(part.parameter) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[part.parameter] = {"step": torch.zeros((), device="meta"), **moments}
    return optimizer

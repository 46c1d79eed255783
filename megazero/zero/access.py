"""Whole float32 weights, gradients and optimizer state of one parameter, read and written, at every stage.

Every rank makes the same calls in the same order, outside a running forward or backward; what a call returns is the
same on every rank. The names are DeepSpeed's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from megazero.errors import MegazeroError
from megazero.zero.block import State
from megazero.zero.homes import InEngine, home_of


@torch.no_grad()
def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """The float32 values that the optimizer updates, in the parameter's shape; None where no engine has it."""
    home = home_of(param)
    if not isinstance(home, InEngine):
        return None
    start, end = _range(home, param)
    (low, high), base = _cut(start, end, home.block.owned), home.block.owned[0]
    whole = torch.zeros(end - start, dtype=torch.float32, device=home.sharded.device)
    whole[low - start : high - start] = home.block.owned_state("weight")[low - base : high - base]
    return _assembled(home, whole).view(param.shape)


@torch.no_grad()
def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace them, and the copy that the model computes with. The first rank's ``value`` counts."""
    home = _in_engine(param, "safe_set_full_fp32_param")
    value = _shared(home, param, value)
    block, base = home.block, home.block.owned[0]
    start, end = _range(home, param)
    low, high = _cut(start, end, block.owned)
    own = value[low - start : high - start]
    block.settle()
    if not block.sharding.parameters or block.state is not State.SHARDED:
        block.use()
        block.views[block.index_of(param)].copy_(value.view(param.shape))
    block.set_values(low - base, own)
    block.write_state("weight", low - base, own)


@torch.no_grad()
def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """The gradient so far in the running step, float32: of the loss's mean over ranks and accumulation steps, before
    clipping, without the loss scale. None where there is none, or the parameter is frozen or in no engine."""
    home = home_of(param)
    if not isinstance(home, InEngine):
        return param.grad
    home.sharded.wait_for_gradients()
    if not home.block.gradient.present:
        return None
    whole = home.block.gradient.share(*_range(home, param), home.sharded.reduced)
    group = home.sharded.groups.whole
    if group.size > 1 and whole.numel():
        group.all_reduce([whole]).wait()
    return (whole / (group.size * _engine(home).loss_scaler.value)).view(param.shape)


@torch.no_grad()
def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """What the optimizer keeps for the parameter under that name (exp_avg, exp_avg_sq, momentum_buffer, ...), float32
    and in its shape, or one number (step). None before the first step, of a frozen parameter, and in no engine."""
    home = home_of(param)
    return _read_state(home, param, optim_state_key)[0] if isinstance(home, InEngine) else None


@torch.no_grad()
def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Replace it. The first rank's ``value`` counts. Raises MegazeroError where the optimizer does not keep it."""
    home = _in_engine(param, "safe_set_full_optimizer_state")
    start, end = _range(home, param)
    present, is_number = _read_state(home, param, optim_state_key)
    if present is None:
        raise MegazeroError(
            "optimizer state: the optimizer keeps nothing before its first step, or of a frozen parameter"
        )
    if is_number:
        raise MegazeroError(
            f"optimizer state: {optim_state_key} is one number for several parameters; it cannot be set for one"
        )
    value = _shared(home, param, value)
    for low, high, state, at in _states(home, start, end):
        own = value[low - start : high - start]
        if home.block.store is None:
            state[optim_state_key].view(-1)[at : at + high - low] = own
        else:
            home.block.write_state(optim_state_key, low - home.block.owned[0], own)


def _read_state(home: InEngine, param: nn.Parameter, key: str) -> tuple[torch.Tensor | None, bool]:
    """(what the optimizer keeps, whether it is one number rather than one per element)"""
    if not home.block.trainable:
        return None, False
    start, end = _range(home, param)
    whole = torch.zeros(end - start, dtype=torch.float32, device=home.sharded.device)
    # Over all parts: how many keep anything, keep this, keep it as a number; the sum of these numbers.
    sums = torch.zeros(4, dtype=torch.float64)
    for low, high, state, at in _states(home, start, end):
        kept = state.get(key)
        is_number = kept is not None and not (isinstance(kept, torch.Tensor) and kept.dim())
        sums += torch.tensor([bool(state), kept is not None, is_number, float(kept) if is_number else 0.0])
        if kept is not None and not is_number:
            whole[low - start : high - start] = kept.reshape(-1)[at : at + high - low]
    sums, group = sums.to(whole.device), home.sharded.groups.whole
    if group.size > 1:
        group.all_reduce([sums]).wait()
    parts, found, numbers, total = sums.tolist()
    if not found:
        if parts:
            raise MegazeroError(f"optimizer state: the optimizer keeps nothing under {key!r}{_known(home)}")
        return None, False
    if numbers:
        return torch.tensor(total / numbers, dtype=torch.float32, device=whole.device), True
    return _assembled(home, whole).view(param.shape), False


def _in_engine(param: nn.Parameter, what: str) -> InEngine:
    home = home_of(param)
    if not isinstance(home, InEngine):
        raise MegazeroError(f"{what}: the parameter is in no engine; pass one of the model given to initialize")
    return home


def _engine(home: InEngine) -> Any:
    engine = home.engine() if home.engine is not None else None
    if engine is None:
        raise MegazeroError("the engine of this parameter is gone; keep what megazero.initialize returned")
    return engine


def _range(home: InEngine, param: nn.Parameter) -> tuple[int, int]:
    entry = home.entry_of(param)
    return entry.start, entry.end


def _cut(start: int, end: int, owned: tuple[int, int]) -> tuple[int, int]:
    """The part of [start, end) that lies in ``owned``; an empty one at its start otherwise."""
    low = min(max(start, owned[0]), end)
    return low, max(low, min(end, owned[1]))


def _assembled(home: InEngine, whole: torch.Tensor) -> torch.Tensor:
    """Ranks' parts of a flat tensor, zero elsewhere, as one."""
    sharded = home.sharded
    if sharded.sharding.state and sharded.groups.shard.size > 1 and whole.numel():
        sharded.groups.shard.all_reduce([whole]).wait()
    return whole


def _shared(home: InEngine, param: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
    """The first rank's values: flat, float32, on the engine's device."""
    if value.shape != param.shape:
        raise MegazeroError(f"the values have shape {tuple(value.shape)}, the parameter {tuple(param.shape)}")
    value = value.detach().to(home.sharded.device, torch.float32, copy=True).contiguous().view(-1)
    if home.sharded.groups.whole.size > 1 and value.numel():
        home.sharded.groups.whole.broadcast(value)
    return value


def _states(home: InEngine, start: int, end: int) -> Iterator[tuple[int, int, dict[str, Any], int]]:
    """This rank's parts of the block's [start, end): (low, high, the optimizer's state of it, where low is in that)."""
    shards = _engine(home).shard_optimizer
    for part in shards.all:
        if part.block is home.block:
            first = part.start()
            low, high = _cut(start, end, (first, first + part.parameter.numel()))
            if low < high:
                yield low, high, shards.state_of(part), low - first


def _known(home: InEngine) -> str:
    names = {
        name for part in _engine(home).shard_optimizer.all for name in _engine(home).optimizer.state[part.parameter]
    }
    return f"; it keeps {', '.join(sorted(names))}" if names else ""

"""Any optimizer of torch's on the parts of the parameters that a rank owns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import wait
from functools import partial
from typing import Any

import torch
from torch import nn

from megazero.errors import ConfigError, MegazeroError
from megazero.optim.host_adamw import HostAdam, Options, Target
from megazero.zero.block import Block
from megazero.zero.offload.store import MOMENTS
from megazero.zero.sharded import ShardedModel


class Part:
    """A stretch of a block's owned range that is one tensor to the optimizer: what of one group a rank owns, or, where
    nothing is cut, one parameter in its own shape."""

    def __init__(self, block: Block, start: int, end: int, shape: Sequence[int]) -> None:
        base = block.owned[0]
        self.block, self.shape = block, tuple(shape)
        self.range = slice(start - base, end - base)
        if block.store is None:
            self.parameter = nn.Parameter(block.master[self.range].view(self.shape))
        else:  # to the optimizer's lists it has its shape; the host updates what it stands for
            self.parameter = nn.Parameter(torch.zeros(()).expand(self.shape))

    def gradient(self) -> torch.Tensor:
        """In the master's dtype; may be written to."""
        return self.block.gradient.owned()[self.range].view(self.shape).to(self.parameter.dtype)

    @property
    def is_on_host(self) -> bool:
        """Whether its state is kept off the device."""
        return self.block.host_grad is not None

    def start(self) -> int:
        return self.block.owned[0] + self.range.start


def parts_of(sharded: ShardedModel, groups: int) -> list[list[Part]]:
    """By optimizer group (named by its index in the layouts), the parts this rank owns."""
    found: list[list[Part]] = [[] for _ in range(groups)]
    for block in sharded.trained:
        if not sharded.sharding.state:
            for entry in block.layout.entries:
                group = (
                    next(int(name) for name, (low, high) in block.layout.groups.items() if low <= entry.start <= high)
                    if entry.spec.numel
                    else None
                )
                if group is not None:
                    # A scalar in one dim, so that its state is told from the scalars that an optimizer keeps.
                    found[group].append(Part(block, entry.start, entry.end, entry.spec.local_shape or (1,)))
            continue
        for name, (start, end) in block.layout.group_ranges(*block.owned).items():
            found[int(name)].append(Part(block, start, end, (end - start,)))
    return found


class ShardOptimizer:
    """Steps a torch optimizer whose groups hold this rank's parts.

    ``optimizer``: its ``param_groups`` keep their options and lose their parameters to the parts. Where torch's kernel
    can skip by a flag on the device (fused Adam and AdamW), a step never waits for the host.
    """

    def __init__(self, sharded: ShardedModel, optimizer: torch.optim.Optimizer, parts: list[list[Part]]) -> None:
        self.sharded, self.optimizer, self.parts = sharded, optimizer, parts
        self.all = [part for group in parts for part in group]
        for group, own in zip(optimizer.param_groups, parts, strict=True):
            group["params"] = [part.parameter for part in own]
        # Some make their state with themselves (Adagrad): what is of the parts stays.
        own = {part.parameter for part in self.all}
        for parameter in [parameter for parameter in optimizer.state if parameter not in own]:
            del optimizer.state[parameter]
        if isinstance(optimizer, torch.optim.Adagrad):
            _fill(optimizer)
        self._stepping = False
        optimizer.register_step_pre_hook(self._check_caller)
        self.skips_on_device = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and all(
            group.get("fused") for group in optimizer.param_groups
        )
        # On the host the kernel runs in the offload's thread, where it is one that is known to run piece by piece.
        known = self.skips_on_device and not any(g["amsgrad"] or g["maximize"] for g in optimizer.param_groups)
        self._host = HostAdam(sharded.tier) if sharded.tier is not None and known else None
        if self._host is None and any(part.block.store is not None for part in self.all):
            raise ConfigError.single(
                "zero_optimization.offload_optimizer",
                f"{type(optimizer).__name__} as it is set up here goes to host memory as float32 alone; for "
                "nvme or 16-bit state use Adam or AdamW, without amsgrad, maximize, foreach or fused=False",
            )
        self._begun: set[Part] = set()  # those whose moments on the host may be other than zero
        optimizer.register_state_dict_pre_hook(lambda _: self.settle())
        optimizer.register_state_dict_post_hook(self._complete)
        optimizer.register_load_state_dict_post_hook(self._loaded)

    def settle(self) -> None:
        """Wait for what the host is updating."""
        for part in self.all:
            part.block.settle()

    @torch.no_grad()
    def step(self, factor: torch.Tensor, skip: torch.Tensor) -> None:
        """``factor``: what gradients are multiplied by. ``skip``: float32 scalar, 1 where nothing may change."""
        on_host = self._updates_on_host(factor, skip)
        stepped = [part for part in self.all if part.block not in on_host]
        self._step(stepped, factor, skip)
        for bucket in self.sharded.update_buckets:
            for block in (self.sharded.blocks[index] for index in bucket):
                if block in on_host:
                    on_host[block]()
                else:
                    block.updated()
            self.sharded.gather_bucket(bucket)

    def _step(self, parts: Sequence[Part], factor: torch.Tensor, skip: torch.Tensor) -> None:
        """By the optimizer's own code."""
        gradients = [part.gradient() for part in parts]
        for device in {gradient.device for gradient in gradients}:
            there = [gradient for gradient in gradients if gradient.device == device]
            torch._foreach_mul_(there, factor.to(device, there[0].dtype))
        for part, gradient in zip(parts, gradients, strict=True):
            part.parameter.grad = gradient
            part.block.changing()
        self._stepping = True
        try:
            if self.skips_on_device and not any(part.is_on_host for part in parts):
                self.optimizer.found_inf = skip
                self.optimizer.grad_scale = None
                self.optimizer.step()
            elif not bool(skip):
                self._step_whole()
        finally:
            self._stepping = False
        for part in parts:
            part.parameter.grad = None

    def _step_whole(self) -> None:
        tier = self.sharded.tier
        if tier is None:
            self.optimizer.step()
        else:  # in the thread that has the cores; an optimizer's own code is not known to leave what it updates alone
            step = tier.submit(self.optimizer.step)
            try:
                step.result()
            finally:
                wait([step])  # a signal has come between: what follows may not run beside it

    def _updates_on_host(self, factor: torch.Tensor, skip: torch.Tensor) -> dict[Block, Callable[[], None]]:
        """What has the offload's thread update a block, for those whose state is there."""
        targets: dict[Block, list[Target]] = {}
        if self._host is None:
            return {}
        for group, own in zip(self.optimizer.param_groups, self.parts, strict=True):
            for part in own:
                if part.is_on_host:
                    targets.setdefault(part.block, []).append(self._target(part, group))
        for block in self.sharded.trained:
            if block.host_grad is not None:
                targets.setdefault(block, [])
                block.before_update()
        if not targets:
            return {}
        host, scalars = self._host, self._host.send(factor, skip, torch.zeros_like(skip), divides=False)
        return {block: partial(host.update, block, own, scalars) for block, own in targets.items()}

    def _target(self, part: Part, group: dict[str, Any]) -> Target:
        state = self.optimizer.state[part.parameter]
        if not state:
            self.set_state(part, {"step": torch.zeros((), dtype=torch.float32)})
            state = self.optimizer.state[part.parameter]
        options = Options(
            float(group["lr"]),
            tuple(map(float, group["betas"])),
            group["eps"],
            group["weight_decay"],
            group.get("decoupled_weight_decay", type(self.optimizer) is torch.optim.AdamW),
        )
        return Target(part.range.start, part.range.stop, options, state["step"])

    def set_state(self, part: Part, state: dict[str, Any]) -> None:
        """What the optimizer keeps for a part is replaced. Where the host updates it, moments are in the block's places
        for them, zero unless given, and the optimizer's own dict has views of those that are tensors."""
        if self._host is None or not part.is_on_host:
            self.optimizer.state[part.parameter] = state
            return
        if part in self._begun:
            state = {name: torch.zeros(part.shape) for name in MOMENTS} | state
        self._begun.add(part)
        kept = {name: value for name, value in state.items() if name not in MOMENTS}
        for name in MOMENTS:
            if part.block.store is None:
                if name not in part.block.optimizer_state:
                    part.block.optimizer_state[name] = part.block.new_state()
                kept[name] = part.block.optimizer_state[name][part.range].view(part.shape)
            if name in state:
                part.block.write_state(name, part.range.start, state[name])
        self.optimizer.state[part.parameter] = kept

    def forget_state(self) -> None:
        """As before the first step."""
        self.settle()
        self.optimizer.state.clear()

    def _complete(self, _: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        """``optimizer.state_dict()`` was called: moments that are not tensors here belong in it as well."""
        for index, part in enumerate(self.all):
            if index in saved["state"]:
                saved["state"][index] = self.state_of(part)

    def _loaded(self, _: torch.optim.Optimizer) -> None:
        """``optimizer.load_state_dict`` was called, which has put new tensors in place of the host's."""
        self.settle()
        for part in self.all:
            if self.optimizer.state.get(part.parameter):
                self.set_state(part, self.optimizer.state[part.parameter])

    def state_of(self, part: Part) -> dict[str, Any]:
        """What the optimizer keeps for a part; moments that are not float32 tensors are read, and copies."""
        part.block.settle()
        state = self.optimizer.state.get(part.parameter, {})
        if part.block.store is None or not state:
            return state
        start, end = part.range.start, part.range.stop
        return state | {name: part.block.store.read(name, start, end).view(part.shape) for name in MOMENTS}

    def _check_caller(self, *_: Any) -> None:
        if not self._stepping:
            raise MegazeroError("optimizer.step() would change nothing here; call engine.step() instead")


def _fill(optimizer: torch.optim.Adagrad) -> None:
    """The state with which it begins, of parameters that it was not made with."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                total = torch.full_like(parameter, group["initial_accumulator_value"])
                step = torch.zeros((), device=parameter.device if group.get("fused") else "cpu")
                optimizer.state[parameter] = {"step": step, "sum": total}

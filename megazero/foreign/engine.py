"""The engine around a model that is not ours: forward, backward and step under ZeRO, as DeepSpeed's users know them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from megazero.ds_config import DsConfig
from megazero.errors import DivergenceError, MegazeroError
from megazero.foreign.loss_scale import LossScale
from megazero.foreign.optimizer import ShardOptimizer
from megazero.foreign.rank import LocalRank
from megazero.topology import Topology
from megazero.zero.partial import GradientNorm
from megazero.zero.sharded import ShardedModel


class ZeroEngine(nn.Module):
    """A user's module under ZeRO. Every rank makes the same calls in the same order.

    ``engine(x)`` runs the module, ``engine.backward(loss)`` its backward, ``engine.step()`` updates the parameters at
    an accumulation boundary. ``loss`` is the user's own: gradients are those of its mean over processes and
    accumulation steps. Attributes that the engine does not have are the module's.
    """

    def __init__(
        self,
        module: nn.Module,
        sharded: ShardedModel,
        optimizer: ShardOptimizer | None,
        config: DsConfig,
        topology: Topology,
        local_rank: int,
    ) -> None:
        super().__init__()
        self.module = module
        self.sharded, self.shard_optimizer, self.ds_config, self.topology = sharded, optimizer, config, topology
        self.device = topology.device
        self.global_rank, self.world_size = topology.rank, topology.layout.world_size
        self.local_rank = LocalRank(local_rank, self.device)
        self.lr_scheduler: Any = None
        self.global_steps = self.micro_steps = self.skipped_steps = self.global_samples = 0
        self.loss_scaler = LossScale(config.precision)
        self._norm = GradientNorm(sharded.trained, topology.coordinates, counts=sharded.groups.replicate.rank == 0)
        self._last_norm = torch.zeros((), dtype=torch.float64, device=self.device)
        self._bad_step = torch.zeros((), dtype=torch.float32, device=self.device)
        self._boundary: bool | None = None
        self._accumulating_only = False
        module.register_forward_pre_hook(self._begin_pass, prepend=True)
        module.register_forward_hook(self._end_pass)
        sharded.gather()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(super().__getattr__("module"), name)

    # The loop

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def _begin_pass(self, module: nn.Module, args: tuple) -> None:
        if not self.sharded.in_backward:
            self.sharded.gather()
            self.sharded.begin_pass()

    def _end_pass(self, module: nn.Module, args: tuple, output: Any) -> None:
        if not self.sharded.in_backward:
            self.sharded.end_forward()

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Gradients of ``loss`` / accumulation steps (of ``loss`` itself where ``scale_wrt_gas`` is false), added to
        those that are there. Returns the loss divided."""
        if self.shard_optimizer is None:
            raise MegazeroError("backward: the model has no parameter with requires_grad, so there is nothing to train")
        if not loss.requires_grad:
            raise MegazeroError(
                "backward: the loss needs no gradient: it was computed under no_grad, or from no trained parameter"
            )
        if scale_wrt_gas:
            loss = loss / self.ds_config.gradient_accumulation_steps
        if self.is_gradient_accumulation_boundary() and not self._accumulating_only:
            self.sharded.reduce_in_next_backward()
        uses = self.sharded.uses.copy()
        self.sharded.begin_backward()
        try:
            (loss * self.loss_scaler.value).backward(retain_graph=retain_graph)
            self.sharded.finish_backward()
        finally:
            self.sharded.in_backward = False
        if retain_graph:
            self.sharded.uses.update({unit: count - self.sharded.uses[unit] for unit, count in uses.items()})
        return loss.detach()

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """At an accumulation boundary: update the parameters and the learning rate. Else only count the micro-step."""
        boundary = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        if not boundary:
            return
        if self.shard_optimizer is None or not any(block.has_grad for block in self.sharded.trained):
            raise MegazeroError("step: no backward has been run since the last step; call engine.backward(loss) first")
        self._update(lr_kwargs or {})

    def _update(self, lr_kwargs: Mapping[str, Any]) -> None:
        self.sharded.finish_gradients()
        squared = self._norm.squared()
        world = self.topology.world
        if world.size > 1:
            world.all_reduce([squared]).wait()
        scale = self.sharded.groups.whole.size * self.loss_scaler.value
        norm = squared.sqrt() / scale
        bad = (~torch.isfinite(squared)).float()
        self._bad_step = torch.where((self._bad_step == 0) & (bad > 0), float(self.global_steps + 1), self._bad_step)
        limit = self.ds_config.gradient_clipping
        factor = (limit / (norm + 1e-6)).clamp(max=1.0) / scale if limit else torch.full_like(norm, 1 / scale)
        overflow = self.loss_scaler.half and bool(bad)
        if overflow:
            self._bad_step.zero_()
        if self.loss_scaler.half and not self.loss_scaler.update(overflow):
            self._bad_step.fill_(self.global_steps + 1)
        self.global_steps += 1
        self.global_samples += self.ds_config.train_batch_size
        skip = torch.maximum(bad, (self._bad_step > 0).float())
        self.shard_optimizer.step(torch.where(skip > 0, 1.0, factor), skip)
        self.sharded.uses.clear()
        self._last_norm = norm
        interval = self.ds_config.steps_per_print
        if not self.shard_optimizer.skips_on_device or (interval and self.global_steps % interval == 0):
            self.raise_if_diverged()
        if overflow:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)

    def raise_if_diverged(self) -> None:
        """DivergenceError where a gradient was not finite in a step since; weights are those before it."""
        step = int(self._bad_step)
        if step:
            raise DivergenceError(
                f"step {step}: the gradient is not finite; the weights are those before this step. Lower the learning "
                "rate, warm up longer, or look at the batches of this step"
            )

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the running micro-step is the last of its step."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self.ds_config.gradient_accumulation_steps == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """From here on the caller says which micro-step is the last."""
        self._boundary = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside reduce nothing. Only where gradients are whole (stages 0 and 1)."""
        if self.sharded.sharding.gradients:
            raise MegazeroError(
                f"no_sync: stage {self.zero_optimization_stage()} cuts gradients, so every backward reduces; use "
                "gradient_accumulation_steps alone, or stage 1"
            )
        before, self._accumulating_only = self._accumulating_only, True
        try:
            yield
        finally:
            self._accumulating_only = before

    def train_batch(self, data_iter: Iterator[Any]) -> torch.Tensor:
        """One optimizer step on the next micro-batches of ``data_iter``; their mean loss, on the device.

        A batch is a tuple or list of arguments, a dict of keyword arguments, or the one argument; the module returns
        the loss, or an object or dict with it under ``loss``, or a tuple that begins with it.
        """
        losses = []
        for _ in range(self.ds_config.gradient_accumulation_steps):
            loss = self._loss_of(next(data_iter))
            losses.append(self.backward(loss))
            self.step()
        return torch.stack(losses).sum()

    @torch.no_grad()
    def eval_batch(self, data_iter: Iterator[Any]) -> torch.Tensor:
        """The mean loss of the next accumulation steps' micro-batches, without gradients."""
        count = self.ds_config.gradient_accumulation_steps
        return torch.stack([self._loss_of(next(data_iter)).detach() for _ in range(count)]).mean()

    def _loss_of(self, batch: Any) -> torch.Tensor:
        batch = _to(batch, self.device)
        if isinstance(batch, Mapping):
            output = self(**batch)
        else:
            output = self(*batch) if isinstance(batch, Sequence) else self(batch)
        if isinstance(output, Mapping):
            output = output["loss"]
        elif hasattr(output, "loss"):
            output = output.loss
        loss = output[0] if isinstance(output, Sequence) else output
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise MegazeroError(
                "train_batch: the module must return a loss of one element, alone or as `loss` or first"
            )
        return loss

    # What it is set to, and how far it is

    def get_global_grad_norm(self) -> float:
        """The norm of the last step's gradient over all ranks, before clipping."""
        return float(self._last_norm)

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        return None if self.shard_optimizer is None else self.shard_optimizer.optimizer

    @property
    def loss_scale(self) -> float:
        return self.loss_scaler.value

    cur_scale = loss_scale

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients that no step has used."""
        for block in self.sharded.trained:
            block.drop_grad()

    def train_batch_size(self) -> int:
        return self.ds_config.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.ds_config.train_micro_batch_size_per_gpu

    def gradient_accumulation_steps(self) -> int:
        return self.ds_config.gradient_accumulation_steps

    def gradient_clipping(self) -> float:
        return self.ds_config.gradient_clipping

    def zero_optimization_stage(self) -> int:
        return self.sharded.settings.stage

    def zero_optimization(self) -> bool:
        return self.sharded.settings.stage > 0

    def fp16_enabled(self) -> bool:
        return self.loss_scaler.half

    def bfloat16_enabled(self) -> bool:
        return self.ds_config.precision.dtype == torch.bfloat16

    def compile(self, **options: Any) -> None:
        """torch.compile the forward of every unit's modules; hooks stay outside."""
        done: set[nn.Module] = set()
        for unit in self.sharded.units:
            for module in unit.plan.modules:
                if module is not self.module and module not in done:
                    module.forward = torch.compile(module.forward, **options)
                    done.add(module)


def _to(batch: Any, device: torch.device) -> Any:
    move: Callable[[Any], Any] = lambda x: x.to(device, non_blocking=True) if isinstance(x, torch.Tensor) else x  # noqa: E731
    if isinstance(batch, Mapping):
        return {name: _to(value, device) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        return [_to(value, device) for value in batch]
    return move(batch)

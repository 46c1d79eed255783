"""The engine around a model that is not ours: forward, backward and step under ZeRO, as DeepSpeed's users know them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from megazero.ds_config import DsConfig
from megazero.errors import DivergenceError, MegazeroError
from megazero.foreign.buffers import about_dtypes
from megazero.foreign.checkpoint import EngineCheckpoints
from megazero.foreign.checks import check_groups, check_loss, check_no_others, check_parameters, check_scheduler
from megazero.foreign.data import Batches, cast_floats, loss_of
from megazero.foreign.export import WeightExport
from megazero.foreign.loss_scale import LossScale
from megazero.foreign.names import EngineNames
from megazero.foreign.optimizer import ShardOptimizer
from megazero.foreign.rank import LocalRank
from megazero.foreign.release import release_module
from megazero.foreign.reports import Reports, StepNumbers
from megazero.topology import Topology
from megazero.zero.edits import EditWatch
from megazero.zero.hooks import Hook
from megazero.zero.partial import GradientNorm, PartialSums
from megazero.zero.sharded import ShardedModel


class ZeroEngine(WeightExport, EngineNames, nn.Module):
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
        reports: Reports,
        inside: Sequence[RemovableHandle] = (),
    ) -> None:
        """``inside``: hooks on modules inside units, which torch.compile would trip over."""
        super().__init__()
        self.module = module
        self.sharded, self.shard_optimizer, self.ds_config, self.topology = sharded, optimizer, config, topology
        self.config: dict[str, Any] = {}
        """The ds_config as it was given."""
        self.device = topology.device
        self.global_rank, self.world_size = topology.rank, topology.layout.world_size
        self.local_rank = LocalRank(local_rank, self.device)
        self.lr_scheduler: Any = None
        self.batches = Batches()
        self.reports, self._inside = reports, inside
        self.global_steps = self.micro_steps = self.skipped_steps = self.global_samples = 0
        self.loss_scaler = LossScale(config.precision)
        self._partial = PartialSums(sharded.trained, topology)
        counts = sharded.groups.replicate.rank == 0
        self._norm = GradientNorm(sharded.trained, topology.coordinates, self.device, counts)
        self._edits = EditWatch(sharded)
        self._last_norm: torch.Tensor | None = None
        self._loss = torch.zeros((), dtype=torch.float64, device=self.device)  # of the running step, on this rank
        self._bad_step = torch.zeros((), dtype=torch.float32, device=self.device)
        self._boundary: bool | None = None
        self.counts_from = 0  # the micro-step at which the accumulation steps of now were set
        self._accumulating_only = False
        self._destroyed = self._failed = False
        self._has_backward = False  # since the last micro-step
        self._applied = False
        sharded.hooks.append(module.register_forward_pre_hook(Hook(self._begin_pass), prepend=True))
        sharded.hooks.append(module.register_forward_hook(Hook(self._end_pass)))
        sharded.gather()
        self._checkpoints = EngineCheckpoints(self)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
        module = super().__getattr__("module")
        try:
            return getattr(module, name)
        except AttributeError as error:
            raise AttributeError(f"neither the engine nor {type(module).__name__} has {name}", name=name) from error

    def __reduce_ex__(self, protocol: int) -> NoReturn:
        raise MegazeroError(
            "an engine cannot be copied or pickled; copy engine.module (at stages 0 to 2), or call save_checkpoint"
        )

    # The loop

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() or self.sharded.sharding.parameters:
            self._check_alive("forward")
        if self.ds_config.precision.auto_cast:
            args, kwargs = cast_floats((args, kwargs), self.ds_config.precision.dtype)
        with self.reports.timed("forward"):
            try:
                return self.module(*args, **kwargs)
            except BaseException as error:
                self.sharded.abandon_forward()
                told = about_dtypes(self.module, self.ds_config.precision.dtype, (args, kwargs), error)
                raise told or error from error.__cause__

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
        self._check_backward(loss)
        if scale_wrt_gas:
            loss = loss / self.ds_config.gradient_accumulation_steps
        if self.is_gradient_accumulation_boundary() and not self._accumulating_only:
            self.sharded.reduce_in_next_backward()
        uses = self.sharded.uses.copy()
        with self.reports.timed("backward"):
            self.sharded.begin_backward()
            try:
                (loss * self.loss_scaler.value).backward(retain_graph=retain_graph)
                self.sharded.finish_backward()
            except BaseException:
                self.sharded.abandon_backward()
                self._failed = True
                raise
        if retain_graph:
            self.sharded.uses.update({unit: count - self.sharded.uses[unit] for unit, count in uses.items()})
        loss = loss.detach()
        self._loss += loss.double().sum()
        self._has_backward = True
        return loss

    def _check_backward(self, loss: torch.Tensor) -> None:
        self._check_alive("backward")
        if self.shard_optimizer is None:
            raise MegazeroError("backward: the model has no parameter with requires_grad, so there is nothing to train")
        check_loss(loss)
        self._check_not_failed("backward")
        check_parameters(self.sharded, at_step=False)

    def _check_alive(self, what: str) -> None:
        if self._destroyed:
            raise MegazeroError(
                f"{what}: the engine was destroyed; make another of the module with initialize (where that is "
                "transformers' Trainer, a new one: each trains once)"
            )

    def _check_not_failed(self, what: str) -> None:
        if self._failed:
            raise MegazeroError(
                f"{what}: the backward before ended in an error, with a part of its gradients made; call "
                "engine.zero_grad(), which forgets all of this step, to go on"
            )

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """At an accumulation boundary: update the parameters and the learning rate. Else only count the micro-step."""
        boundary = self.is_gradient_accumulation_boundary()
        with self.reports.timed("step"):
            self._check_step(boundary)
            self._applied = False
            if boundary:
                self._update(lr_kwargs or {})
            self.micro_steps += 1
            self._has_backward = False
        if boundary:
            self._end_step()

    def _check_step(self, boundary: bool) -> None:
        self._check_alive("step")
        if self.shard_optimizer is not None:
            self._check_not_failed("step")
            if boundary:
                check_parameters(self.sharded, at_step=True)
                check_groups(self.shard_optimizer)
        # What was made may have been forgotten since.
        if not self._has_backward or boundary and not any(block.gradient.present for block in self.sharded.trained):
            raise MegazeroError("step: no backward has been run since the last step; call engine.backward(loss) first")

    def _end_step(self) -> None:
        self._report()
        if self.sharded.tier is not None and (advice := self.sharded.tier.advice()) is not None:
            self.reports.say(advice)

    @property
    def _loss_ranks(self) -> int:
        """Processes that have a loss of their own."""
        return self.topology.world.size // self.num_stages

    def _update(self, lr_kwargs: Mapping[str, Any]) -> None:
        if self.lr_scheduler is not None:
            check_scheduler(self.lr_scheduler, lr_kwargs)
        self.sharded.finish_gradients()
        self._partial.sum()
        self._edits.take()
        sums = torch.stack((self._norm.squared(), self._loss))
        world, alarm = self.topology.world, self._checkpoints.alarm()
        if world.size > 1:
            world.all_reduce([sums, *alarm]).wait()
        self._checkpoints.heard(alarm)
        squared, self._loss = sums[0], sums[1] / self._loss_ranks
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
        skip = torch.maximum(bad, (self._bad_step > 0).float())
        lr = self.get_lr()[0]
        self.shard_optimizer.step(torch.where(skip > 0, 1.0, factor), skip)
        self._edits.note()
        self.sharded.end_step()
        if not overflow:  # of no use to whoever logs it: it is not finite, whatever the loss was
            self._last_norm = norm
        self.global_steps += 1
        self.global_samples += self.ds_config.train_batch_size
        self._applied = not overflow
        self.optimizer.overflow = overflow  # accelerate asks it whether the step was skipped
        if overflow:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        self._numbers = StepNumbers(
            self._loss, norm, lr, self.loss_scaler.value, self.global_samples, self.train_batch_size()
        )

    def _report(self) -> None:
        looks = self.reports.step(self.global_steps, self._numbers)
        self._loss = torch.zeros_like(self._loss)
        if looks or not self.shard_optimizer.skips_on_device:
            self.raise_if_diverged()
        if looks:
            check_no_others(self.module, self.sharded)

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
        return (self.micro_steps - self.counts_from + 1) % self.ds_config.gradient_accumulation_steps == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """From here on the caller says which micro-step is the last."""
        self._boundary = is_boundary

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """From the next step on, take as many micro-batches as make this many samples over all processes.

        Called by every rank, between steps. Raises MegazeroError inside a step, ConfigError where no whole number of
        micro-batches makes it.
        """
        if any(block.gradient.present for block in self.sharded.trained):
            raise MegazeroError(
                "set_train_batch_size: micro-batches of a step have been accumulated; call it after engine.step() at "
                "an accumulation boundary, or forget them with engine.zero_grad()"
            )
        self.ds_config = self.ds_config.with_train_batch_size(train_batch_size)
        self.counts_from = self.micro_steps

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

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """One optimizer step on the next micro-batches of ``data_iter``, or of the dataloader of ``training_data``,
        epoch after epoch; their mean loss, on the device. Batches and losses: see ``data.loss_of``."""
        losses = []
        for batch in list(self.batches.read("train_batch", data_iter, self.ds_config.gradient_accumulation_steps)):
            losses.append(self.backward(loss_of(self, batch, self.device)))
            self.step()
        return torch.stack(losses).sum()

    @torch.no_grad()
    def eval_batch(self, data_iter: Iterator[Any]) -> torch.Tensor:
        """The mean loss of the next accumulation steps' micro-batches, without gradients, in evaluation mode."""
        training = self.training
        self.eval()
        try:
            batches = self.batches.read("eval_batch", data_iter, self.ds_config.gradient_accumulation_steps)
            return torch.stack([loss_of(self, batch, self.device).detach() for batch in batches]).mean()
        finally:
            self.train(training)

    # Checkpoints

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write everything that training goes on from under ``save_dir``/``tag``; called by every rank. Returns True.

        Args:
            tag: global_step{N} unless given; a checkpoint of that name is there until the new one is whole.
            client_state: JSON values that ``load_checkpoint`` gives back; rank 0's.
            save_latest: whether ``save_dir``/latest is to name this one.
            exclude_frozen_parameters: leave out what has requires_grad False.

        With checkpoint.async_save the state is copied and written while training goes on; an error in that is raised
        after a later step, or by the next of ``save_checkpoint``, ``load_checkpoint`` and ``wait_for_checkpoint``.
        Raises CheckpointError on every rank; what was saved before is untouched.
        """
        self._check_alive("save_checkpoint")
        check_no_others(self.module, self.sharded)
        self._adopt_edits()
        self._checkpoints.save(save_dir, tag, client_state, save_latest, exclude_frozen_parameters)
        return True

    def wait_for_checkpoint(self) -> None:
        """Return when the last checkpoint is whole on the disk; raise the CheckpointError of one that failed."""
        self._checkpoints.wait()

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any]]:
        """(the checkpoint's directory, its client_state); (None, {}) where ``load_dir`` holds none. By every rank.

        Args:
            tag: the one that ``load_dir``/latest names, unless given; else the newest that is whole.
            load_module_strict: false: parameters that only one side has are left as they are.
            load_optimizer_states: false: the optimizer goes on as it is.
            load_lr_scheduler_states: false: so does the schedule.
            load_module_only: weights and buffers, and nothing else.

        A checkpoint of any number of ranks and any stage. Raises CheckpointError on every rank before anything is
        changed: where it is damaged, of another model, or of another optimizer.
        """
        self._check_alive("load_checkpoint")
        found = self._checkpoints.load(
            load_dir, tag, load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only
        )
        self._edits.note()
        self._bad_step.zero_()
        self._loss = torch.zeros_like(self._loss)
        self._failed = False
        return found

    def _adopt_edits(self) -> None:
        self._edits.take()
        self._edits.note()

    # What it is set to, and how far it is

    @property
    def num_stages(self) -> int:
        """Of a pipeline; what is not one has one."""
        return 1

    @property
    def training_dataloader(self) -> Iterable[Any] | None:
        """What ``train_batch`` reads where it is given no iterator."""
        return self.batches.loader

    @training_dataloader.setter
    def training_dataloader(self, loader: Iterable[Any] | None) -> None:
        self.batches = Batches(loader)

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last step's gradient over all ranks, before clipping; None before the first step. A step that
        float16's loss scale has skipped is none.

        Raises DivergenceError where a gradient was not finite otherwise.
        """
        if self._last_norm is None:
            return None
        self.raise_if_diverged()
        return float(self._last_norm)

    def get_lr(self) -> list[float]:
        """Of each parameter group, as the next step uses it."""
        return [float(group["lr"]) for group in self._groups()]

    def set_lr(self, lr: float) -> None:
        """For every parameter group; a scheduler sets its own at the next step."""
        for group in self._groups():
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def _groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else self.optimizer.param_groups

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        return None if self.shard_optimizer is None else self.shard_optimizer.optimizer

    @property
    def loss_scale(self) -> float:
        return self.loss_scaler.value

    cur_scale = loss_scale

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients that no step has used."""
        self.sharded.forget_gradients()
        self._failed = False
        for parameter in self.module.parameters():
            parameter.grad = None
        self._loss = torch.zeros_like(self._loss)

    def compile(
        self, backend: Any = "inductor", compile_kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        """torch.compile the forward of every unit's modules, with ``compile_kwargs`` and ``options`` as its arguments;
        hooks stay outside."""
        options = {"backend": backend, **(compile_kwargs or {}), **options}
        for handle in self._inside:
            handle.remove()
        done: set[nn.Module] = set()
        for unit in self.sharded.units:
            for module in unit.plan.modules:
                if module is not self.module and module not in done:
                    module.forward = torch.compile(module.forward, **options)
                    done.add(module)

    def destroy(self) -> None:
        """Wait for a checkpoint under way, write out the metrics that are left, and let the module go: as it was before
        `initialize`, with the weights of now in the dtype of the engine, at stage 3 cut as zero.Init leaves them. The
        process group stays, for who made it. Called by every rank; safe to call twice."""
        self._checkpoints.wait()
        self.reports.close()
        try:
            if not self._destroyed:
                self._destroyed = True
                release_module(self.sharded)
        finally:
            self.sharded.close()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> ZeroEngine:
        """What ``to``, ``half`` and the like come to. Parameters stay in their buffers, so nothing may change."""
        for dtype in {block.flat.dtype for block in self.sharded.blocks}:
            probe = torch.empty(1, dtype=dtype, device=self.device)
            moved = fn(probe)
            if moved.dtype != probe.dtype or moved.device != probe.device:
                raise MegazeroError(
                    f"the engine keeps its parameters in {probe.dtype} on {probe.device}; it cannot move them to "
                    f"{moved.dtype} on {moved.device}. Set the dtype in the config, with bf16 or fp16, and the device "
                    "by the launcher"
                )
        return self

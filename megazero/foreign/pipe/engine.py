"""The engine around a PipelineModule: whole steps, as every stage takes its part in each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch

from megazero.errors import MegazeroError
from megazero.foreign.checks import check_parameters
from megazero.foreign.engine import ZeroEngine
from megazero.foreign.pipe.grid import PipelineGrid
from megazero.foreign.pipe.module import PipelineModule
from megazero.foreign.pipe.stage import LayerStage, MicroBatch
from megazero.foreign.pipe.transfers import AnnouncedTransfers
from megazero.foreign.start import timeout_of
from megazero.pipeline.executor import Executor
from megazero.pipeline.rank_schedules import RankSchedules


class PipelineEngine(ZeroEngine):
    """A PipelineModule under ZeRO. Every rank makes the same calls in the same order.

    ``train_batch`` is a step: the accumulation steps' micro-batches go through the stages by the 1F1B schedule. Each
    micro-batch is (inputs, labels); the first stage reads inputs, the last one labels, the others read nothing.
    """

    module: PipelineModule

    def __init__(self, module: PipelineModule, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
        precision = self.ds_config.precision
        self.stage = LayerStage(module, self.sharded, precision.dtype if precision.auto_cast else None)
        self._executor = Executor(self.stage, self._transfers())
        self._schedules = RankSchedules("1f1b", module.num_stages, 1, module.stage_id)
        trained = torch.tensor(float(bool(self.sharded.trained)), device=self.device)
        if self.topology.world.size > 1:
            self.topology.world.all_reduce([trained]).wait()
        self._trains = bool(trained)
        self.grid = self.mpu = PipelineGrid(self.topology)
        self._batch_fn: Callable[[Any], Any] | None = None

    def _transfers(self) -> AnnouncedTransfers | None:
        module, topology = self.module, self.topology
        if module.num_stages == 1:
            return None
        group, ranks = topology.group("pp"), topology.layout.along(topology.rank, "pp")
        transfers = AnnouncedTransfers(
            group,
            ranks,
            module.stage_id,
            self.device,
            module.pairs,
            module.dynamic_shape,
            timeout_of(self.device),
        )
        transfers.connect(module.stage_id, ring=False)
        return transfers

    @property
    def num_stages(self) -> int:
        return self.module.num_stages

    def is_first_stage(self) -> bool:
        return self.module.is_first_stage

    def is_last_stage(self) -> bool:
        return self.module.is_last_stage

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """What ``train_batch`` reads where it is given no iterator, epoch after epoch."""
        if not isinstance(loader, Iterable):
            raise MegazeroError(f"set_dataloader: takes what gives batches, not a {type(loader).__name__}")
        self.training_dataloader = loader

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """The same of an iterator, from where it is."""
        self.set_dataloader(iterator)

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """``fn``: what makes (inputs, labels) of each batch that is read."""
        if not callable(fn):
            raise MegazeroError(f"set_batch_fn: takes a function of a batch, not a {type(fn).__name__}")
        self._batch_fn = fn

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """One optimizer step on the next micro-batches of ``data_iter``, or of the dataloader of ``training_data``,
        epoch after epoch; their mean loss over all processes, on every rank's device.

        ``data_iter``: read on the first and the last stage, which must find the same there; None will do on others.
        """
        self._check_alive("train_batch")
        if not self._trains:
            raise MegazeroError("train_batch: no layer has a parameter with requires_grad: there is nothing to train")
        count = self.ds_config.gradient_accumulation_steps
        micro_batches = self._read("train_batch", data_iter, count)
        self._check_not_failed("train_batch")
        check_parameters(self.sharded, at_step=True)
        self.module.train()
        self.stage.begin(self.loss_scaler.value / count)
        with self.reports.timed("forward and backward"):
            try:
                self._executor.run(self._schedules.training(count), micro_batches, _ignored)
            except BaseException:
                self.sharded.abandon_backward()
                self._failed = True
                raise
        self.module.check_strangers()
        self._loss = self._mean(self.stage.losses)
        with self.reports.timed("step"):
            self._update({})
        self.micro_steps += count
        loss = self._loss
        self._end_step()
        return loss.float()

    @torch.no_grad()
    def eval_batch(
        self, data_iter: Iterator[Any], return_logits: bool = False, num_micro_batches: int | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, list[Any] | None]:
        """The mean loss over all processes of the next micro-batches, without gradients, in evaluation mode.

        Args:
            data_iter: as of ``train_batch``.
            return_logits: give (loss, what the last layer gave of each micro-batch; None but on the last stage).
            num_micro_batches: as many as the accumulation steps, unless given.
        """
        count = self.ds_config.gradient_accumulation_steps if num_micro_batches is None else num_micro_batches
        if count < 1:
            raise MegazeroError(f"eval_batch: num_micro_batches is {count}; use 1 or more")
        micro_batches = self._read("eval_batch", data_iter, count)
        training = self.module.training
        self.module.eval()
        self.stage.begin(1.0, return_logits)
        try:
            self._executor.run(self._schedules.evaluation(count), micro_batches, _ignored)
        finally:
            self.module.train(training)
        loss = self._mean(self.stage.losses)
        if self.topology.world.size > 1:
            self.topology.world.all_reduce([loss]).wait()
        loss = (loss / self._loss_ranks).float()
        return (loss, self.stage.outputs) if return_logits else loss

    def _mean(self, losses: list[torch.Tensor]) -> torch.Tensor:
        """Of this rank's micro-batches; zero where it is not on the last stage. float64."""
        if not self.is_last_stage():
            return torch.zeros((), dtype=torch.float64, device=self.device)
        return torch.stack(losses).mean().to(self.device)

    def _read(self, what: str, data_iter: Iterator[Any] | None, count: int) -> list[MicroBatch]:
        """Of the micro-batches of a step, what this stage uses of each."""
        first, last = self.is_first_stage(), self.is_last_stage()
        if not (first or last):
            return [(None, None)] * count
        found: list[MicroBatch] = []
        for batch in self.batches.read(what, data_iter, count):
            batch = batch if self._batch_fn is None else self._batch_fn(batch)
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                kind = f"{type(batch).__name__}" + (f" of {len(batch)}" if isinstance(batch, tuple | list) else "")
                raise MegazeroError(f"{what}: a batch is a {kind}; a pipeline's is (inputs, labels)")
            found.append((batch[0] if first else None, batch[1] if last else None))
        return found

    # What has no meaning on one stage alone

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("engine(...)", "train_batch(data_iter), or eval_batch(data_iter) for a loss without gradients")

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("backward", "train_batch(data_iter), which runs forward, backward and step")

    def step(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("step", "train_batch(data_iter), which runs forward, backward and step")

    def no_sync(self) -> NoReturn:
        self._refuse("no_sync", "train_batch(data_iter), which reduces once for all its micro-batches")

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> NoReturn:
        self._refuse("set_gradient_accumulation_boundary", "train_batch(data_iter), which is a whole step")

    def save_16bit_model(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("save_16bit_model", "save_checkpoint, and tools/consolidate_checkpoint.py on what that wrote")

    def _zero3_consolidated_16bit_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("a consolidated state dict", "save_checkpoint, and tools/consolidate_checkpoint.py")

    def _refuse(self, what: str, instead: str) -> NoReturn:
        raise MegazeroError(f"{what}: a process has one stage of the pipeline; call {instead}")


def _ignored(loss: torch.Tensor) -> None:
    """The stage keeps its losses itself."""

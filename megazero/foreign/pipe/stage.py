"""One stage of a PipelineModule as the pipeline executor drives it."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import torch

from megazero.errors import MegazeroError
from megazero.foreign.data import cast_floats
from megazero.foreign.pipe.module import PipelineModule
from megazero.pipeline.bundle import Bundle
from megazero.zero.sharded import ShardedModel

MicroBatch = tuple[Any, Any]
"""(what the first layer is given, labels): each a tensor, or tuples of tensors; None on stages that use neither."""


class LayerStage:
    """The layers of one stage, with their parameters under ZeRO.

    ``dtype``: what floating-point inputs of the first layer are cast to; None: they stay as they are. ``loss_weight``:
    what a micro-batch's loss is multiplied by before backward. On the last stage ``losses`` has those of the
    micro-batches so far, unweighted, and ``outputs``, where it is a list, what the last layer gave.
    """

    def __init__(self, module: PipelineModule, sharded: ShardedModel, dtype: torch.dtype | None) -> None:
        self.module, self.sharded, self._dtype = module, sharded, dtype
        self._device = module.topology.device
        self.loss_weight = 1.0
        self.losses: list[torch.Tensor] = []
        self.outputs: list[Any] | None = None
        self._uses: deque[Counter[int]] = deque()  # of each micro-batch whose backward is to come

    def forward(self, micro_batch: MicroBatch, x: Bundle | None, chunk: int) -> Bundle | torch.Tensor:
        """What the stage before gave, None on the first → what this one gives; the weighted loss on the last."""
        self.sharded.begin_forward(chunk)
        inputs, labels = micro_batch
        output = self.module.forward(self._first(inputs) if x is None else _unpacked(x))
        if not self.module.is_last_stage:
            result: Bundle | torch.Tensor = self._packed(output)
        else:
            if self.outputs is not None:
                self.outputs.append(output)
            result = self._loss(output, moved(labels, self._device))
        self.sharded.end_forward()
        if torch.is_grad_enabled():
            self._uses.append(self.sharded.uses)
        return result

    def _first(self, inputs: Any) -> Any:
        inputs = moved(inputs, self._device)
        return inputs if self._dtype is None else cast_floats(inputs, self._dtype)

    def _packed(self, output: Any) -> Bundle:
        tensors = (output,) if isinstance(output, torch.Tensor) else output
        wrong = None if isinstance(tensors, tuple) else tensors
        for x in tensors if wrong is None else ():
            wrong = x if not isinstance(x, torch.Tensor) else wrong
        if wrong is not None or not tensors:
            stage, last = self.module.stage_id, self.module.partition[self.module.stage_id][-1]
            kind = "nothing" if wrong is None else f"a {type(wrong).__name__}"
            raise MegazeroError(
                f"layer {last}, the last of stage {stage}, gives {kind}; from stage to stage pass tensors, one or a "
                "tuple of them"
            )
        return Bundle(tensors, isinstance(output, torch.Tensor), [x.requires_grad for x in tensors])

    def _loss(self, output: Any, labels: Any) -> torch.Tensor:
        loss = output if self.module.loss_fn is None else self.module.loss_fn(output, labels)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = "the last layer gives" if self.module.loss_fn is None else "loss_fn gives"
            kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise MegazeroError(f"{what} {kind}; a loss must be a tensor of one element: its mean, say")
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise MegazeroError("the loss needs no gradient: no trained parameter leads to it")
        self.losses.append(loss.detach().double().reshape(()))
        return loss.reshape(()) * self.loss_weight

    def backward(self, output: Bundle | torch.Tensor, gradient: Bundle | None, chunk: int) -> None:
        # Backward is of the oldest forward; a layer that is recomputed counts where that one did.
        newest, self.sharded.uses = self.sharded.uses, self._uses.popleft()
        self.sharded.begin_backward(chunk)
        try:
            if isinstance(output, torch.Tensor):
                output.backward()
            elif any(output.trained):
                torch.autograd.backward(output.differentiable(), gradient.tensors if gradient is not None else None)
            self.sharded.finish_backward()
        finally:
            self.sharded.in_backward, self.sharded.uses = False, newest

    def gather(self) -> None:
        self.sharded.gather()

    def reduce(self) -> None:
        self.sharded.reduce_in_next_backward()

    def begin(self, loss_weight: float, keeps_outputs: bool = False) -> None:
        """A step, or an evaluation, starts."""
        self.loss_weight, self.losses = loss_weight, []
        self.outputs = [] if keeps_outputs and self.module.is_last_stage else None
        self._uses.clear()


def _unpacked(x: Bundle) -> Any:
    """As the layer before gave it. Copies: what is received is a leaf, on which nothing may be done in place."""
    copies = tuple(t.clone() if t.requires_grad else t for t in x.tensors)
    return copies[0] if x.alone else copies


def moved(value: Any, device: torch.device) -> Any:
    """Tensors of nested tuples and lists on the device, lists as tuples; the rest as it is."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, tuple | list):
        return tuple(moved(part, device) for part in value)
    return value

"""Obeys a schedule's list of actions on one pipeline stage. Knows no schedule by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from megazero.pipeline.p2p import Transfers
from megazero.pipeline.schedules import COMMUNICATION, SENDS, Action, Kind, groups


class Stage(Protocol):
    """What the executor drives: one stage's share of the model."""

    def forward(self, micro_batch: Any, x: torch.Tensor | None) -> torch.Tensor:
        """Previous stage's output (None on the first) → this stage's, or the loss on the last: a scalar."""
        ...

    def gather(self) -> None:
        """Parameters will be used from here on."""
        ...

    def reduce(self) -> None:
        """The next backward completes the gradients."""
        ...

    def backward(self, output: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """The gradient of what a forward returned (None for the loss) → those of its input and of the parameters."""
        ...


class Executor:
    """Runs action lists; ``transfers`` is None where the pipeline has one stage."""

    def __init__(self, stage: Stage, transfers: Transfers | None) -> None:
        self.stage, self.transfers = stage, transfers

    def run(
        self, actions: Sequence[Action], micro_batches: Sequence[Any], on_loss: Callable[[torch.Tensor], None]
    ) -> None:
        """One step. ``on_loss`` is given each micro-batch's detached loss, on the last stage only."""
        _Run(self, micro_batches, on_loss).run(actions)


class _Run:
    """The tensors of one step that wait for their next action, by micro-batch."""

    def __init__(
        self, executor: Executor, micro_batches: Sequence[Any], on_loss: Callable[[torch.Tensor], None]
    ) -> None:
        self.stage, self.transfers = executor.stage, executor.transfers
        self.micro_batches, self.on_loss = micro_batches, on_loss
        self.inputs: dict[int, torch.Tensor] = {}
        self.outputs: dict[int, torch.Tensor] = {}
        self.gradients: dict[int, torch.Tensor] = {}  # of outputs when received, of inputs when to be sent

    def run(self, actions: Sequence[Action]) -> None:
        training = any(action.kind is Kind.BACKWARD for action in actions)
        with torch.set_grad_enabled(training):
            for _, group in groups(actions):
                self._take(group, training)
        if self.transfers is not None:
            self.transfers.drain()

    def _take(self, group: Sequence[Action], training: bool) -> None:
        action = group[0]
        if action.kind in COMMUNICATION:
            self._communicate(group, training)
        elif action.kind is Kind.GATHER:
            self.stage.gather()
        elif action.kind is Kind.REDUCE:
            self.stage.reduce()
        elif action.kind is Kind.FORWARD:
            self._forward(action.micro_batch, training)
        else:
            self._backward(action.micro_batch)

    def _forward(self, index: int, training: bool) -> None:
        output = self.stage.forward(self.micro_batches[index], self.inputs.get(index))
        if output.dim() == 0:
            self.on_loss(output.detach())
        self.outputs[index] = output
        if not training:
            self.inputs.pop(index, None)
            if output.dim() == 0:
                del self.outputs[index]

    def _backward(self, index: int) -> None:
        output = self.outputs.pop(index)
        self.stage.backward(output, self.gradients.pop(index, None))
        x = self.inputs.pop(index, None)
        if x is not None:
            assert x.grad is not None
            self.gradients[index] = x.grad

    def _communicate(self, group: Sequence[Action], training: bool) -> None:
        assert self.transfers is not None
        sends, receives = [], []
        for action in group:
            if action.kind in SENDS:
                forward = action.kind is Kind.SEND_FORWARD
                tensor = self.outputs[action.micro_batch] if forward else self.gradients.pop(action.micro_batch)
                sends.append((tensor, action.peer))
                if forward and not training:
                    del self.outputs[action.micro_batch]
            else:
                receives.append(action)
        received = self.transfers.exchange(sends, [action.peer for action in receives])
        for action, tensor in zip(receives, received, strict=True):
            if action.kind is Kind.RECV_FORWARD:
                self.inputs[action.micro_batch] = tensor.requires_grad_(training)
            else:
                self.gradients[action.micro_batch] = tensor

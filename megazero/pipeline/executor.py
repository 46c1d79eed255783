"""Obeys a schedule's list of actions on one pipeline rank. Knows no schedule by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Protocol

import torch

from megazero.pipeline.bundle import Bundle, Payload
from megazero.pipeline.p2p import Receipt, Transfers
from megazero.pipeline.schedules import BROUGHT_BY, COMMUNICATION, SENDS, Action, Kind, Pass, groups

Trace = Callable[[Action], AbstractContextManager]
"""Entered around every action as the host takes it: a transfer's issue, together with the rest of its batch; once more
around the wait for a received tensor; everything else once. Nesting is by batch, in list order."""

_UNTRACED = nullcontext()


class Stage(Protocol):
    """What the executor drives: one rank's share of the model, in one chunk or several."""

    def forward(self, micro_batch: Any, x: Payload | None, chunk: int) -> Payload:
        """Previous stage's output (None on the first) → this chunk's, or the loss on the last stage: a scalar."""
        ...

    def gather(self) -> None:
        """Parameters will be used from here on."""
        ...

    def reduce(self) -> None:
        """The next backward completes the gradients of its chunk."""
        ...

    def backward(self, output: Payload, gradient: Payload | None, chunk: int) -> None:
        """The gradient of what a forward returned (None for the loss) → those of its input and of the parameters."""
        ...

    def backward_input(self, output: Payload, gradient: Payload | None, chunk: int) -> None:
        """As ``backward``, but gradients of parameters may be left to ``backward_weight``."""
        ...

    def backward_weight(self, chunk: int) -> None:
        """What the first ``backward_input`` of the chunk that this has not yet been called for has left."""
        ...


class Executor:
    """Runs action lists; ``transfers`` is None where the pipeline has one stage. ``trace`` may be set between steps.
    ``note`` is told of every batch of actions as it begins, and of a transfer again where what it brings is awaited."""

    def __init__(
        self,
        stage: Stage,
        transfers: Transfers | None,
        trace: Trace | None = None,
        note: Callable[[Action], None] | None = None,
    ) -> None:
        self.stage, self.transfers, self.trace = stage, transfers, trace
        self.note = note or _nothing

    def run(
        self, actions: Sequence[Action], micro_batches: Sequence[Any], on_loss: Callable[[torch.Tensor], None]
    ) -> None:
        """One step. ``on_loss`` is given each micro-batch's detached loss, on the last stage only."""
        _Run(self, micro_batches, on_loss).run(actions)


def _nothing(action: Action) -> None:
    pass


class _Run:
    """The tensors of one step that wait for their next action, by micro-batch and chunk."""

    def __init__(
        self, executor: Executor, micro_batches: Sequence[Any], on_loss: Callable[[torch.Tensor], None]
    ) -> None:
        self.stage, self.transfers, self.trace = executor.stage, executor.transfers, executor.trace
        self.note = executor.note
        self.micro_batches, self.on_loss = micro_batches, on_loss
        self.receipts: dict[tuple[Kind, Pass], tuple[Action, Receipt]] = {}
        self.inputs: dict[Pass, Payload] = {}
        self.outputs: dict[Pass, Payload] = {}
        self.input_gradients: dict[Pass, Payload] = {}

    def run(self, actions: Sequence[Action]) -> None:
        training = any(action.kind is Kind.REDUCE for action in actions)
        with torch.set_grad_enabled(training):
            for _, group in groups(actions):
                self.note(group[0])
                if group[0].kind in COMMUNICATION:
                    with self._traced(group):
                        self._communicate(group, training)
                else:
                    self._take(group[0], training)
        if self.transfers is not None:
            self.transfers.drain()

    def _traced(self, actions: Sequence[Action]) -> AbstractContextManager:
        if self.trace is None:
            return _UNTRACED
        stack = ExitStack()
        for action in actions:
            stack.enter_context(self.trace(action))
        return stack

    def _take(self, action: Action, training: bool) -> None:
        received = self._received(BROUGHT_BY[action.kind], action) if action.kind in BROUGHT_BY else None
        with self._traced((action,)):
            if action.kind is Kind.GATHER:
                self.stage.gather()
            elif action.kind is Kind.REDUCE:
                self.stage.reduce()
            elif action.kind is Kind.FORWARD:
                self._forward(action, received, training)
            elif action.kind is Kind.BACKWARD_WEIGHT:
                self.stage.backward_weight(action.chunk)
            else:
                self._backward(action, received)

    def _received(self, kind: Kind, action: Action) -> Payload | None:
        """What a transfer has brought for a computation; None where there is none."""
        receive, receipt = self.receipts.pop((kind, _pass_of(action)), (None, None))
        if receive is None:
            return None
        assert self.transfers is not None
        self.note(receive)
        with self._traced((receive,)):
            received = self.transfers.wait(receipt)
        self.note(action)
        return received

    def _forward(self, action: Action, x: Payload | None, training: bool) -> None:
        key = _pass_of(action)
        if x is not None and training:
            self.inputs[key] = x if isinstance(x, Bundle) else x.requires_grad_()
        output = self.stage.forward(self.micro_batches[action.micro_batch], x, action.chunk)
        is_loss = isinstance(output, torch.Tensor) and output.dim() == 0
        if is_loss:
            self.on_loss(output.detach())
        if training or not is_loss:
            self.outputs[key] = output

    def _backward(self, action: Action, gradient: Payload | None) -> None:
        key = _pass_of(action)
        backward = self.stage.backward if action.kind is Kind.BACKWARD else self.stage.backward_input
        backward(self.outputs.pop(key), gradient, action.chunk)
        x = self.inputs.pop(key, None)
        if isinstance(x, Bundle):
            self.input_gradients[key] = x.gradient()
        elif x is not None:
            assert x.grad is not None
            self.input_gradients[key] = x.grad

    def _communicate(self, batch: Sequence[Action], training: bool) -> None:
        assert self.transfers is not None
        sends = [self._to_send(action, training) for action in batch if action.kind in SENDS]
        receives = [action for action in batch if action.kind not in SENDS]
        outputs = [self.outputs[_pass_of(a)] for a in receives if a.kind is Kind.RECV_BACKWARD]
        receipts = self.transfers.issue(batch[0].peer, sends, len(receives), outputs)
        for action, receipt in zip(receives, receipts, strict=True):
            self.receipts[action.kind, _pass_of(action)] = action, receipt

    def _to_send(self, action: Action, training: bool) -> Payload:
        key = _pass_of(action)
        if action.kind is Kind.SEND_BACKWARD:
            return self.input_gradients.pop(key)
        return self.outputs[key] if training else self.outputs.pop(key)


def _pass_of(action: Action) -> Pass:
    return action.micro_batch, action.chunk

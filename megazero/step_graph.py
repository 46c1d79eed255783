"""All forwards and backwards of a step as one CUDA graph: the host issues it at once, not kernel by kernel.

[Note: what a graph repeats]
Kernels and the addresses they work on, and nothing that Python does. So micro-batches are copied to where those of the
captured step were, parameters are whole before it begins, and what the blocks and the reduction of gradients have to
know at its end they are told. Its memory is a pool of its own: activations and gradients lie where they lay when it was
captured, and nobody else gets that memory between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from megazero.pipeline.schedules import Action
from megazero.stage import DecoderStage, MicroBatch

WARM_UP = 2
"""Steps that run as they are before one is captured: the first compiles, and chooses kernels by trying them."""

Run = Callable[[Sequence[Action], Sequence[MicroBatch]], torch.Tensor]


class Graph(Protocol):
    """What a function has done on the device, to be done again."""

    def replay(self) -> None: ...

    def reset(self) -> None:
        """It is not to be replayed any more: give its memory back."""
        ...


def capture(work: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
    """Record what ``work()`` does, without doing it; also what it returns, whose values come with a replay."""
    graph = torch.cuda.CUDAGraph()
    # Another thread may pin memory for the next micro-batches meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = work()
    return graph, result


class StepGraph:
    """Runs steps: the first few as they are, then by a graph, which is captured anew where the micro-batches have other
    shapes or another number. For one process without offload, whose parameters stay whole (ZeRO 0 and 1)."""

    def __init__(
        self,
        run: Run,
        stage: DecoderStage,
        record: Callable[[Callable[[], torch.Tensor]], tuple[Graph, torch.Tensor]] = capture,
    ) -> None:
        """``run``: a step's forwards and backwards; returns the loss, a scalar."""
        self._run, self._stage, self._record = run, stage, record
        self._key: Any = None
        self._before = 0  # steps that are still to run as they are
        self._graph: Graph | None = None
        self._inputs: list[dict[str, torch.Tensor]] = []
        self._loss_weight: float | torch.Tensor = 1.0
        self._loss = torch.empty(0)
        self._gradients: list[torch.Tensor] = []

    def run(self, actions: Sequence[Action], micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        """A step's forwards and backwards; returns the loss, a scalar that is the caller's."""
        key = _key(micro_batches, self._stage.loss_weight)
        if key != self._key:
            self._forget()
            self._key, self._before = key, WARM_UP
        if self._before:
            self._before -= 1
            return self._run(actions, micro_batches)
        sharded = self._stage.sharded
        sharded.gather()
        for block in sharded.blocks:
            block.use()
        if self._graph is None:
            self._capture(actions, micro_batches)
        else:
            self._fill(micro_batches)
            sharded.take_gradients(self._gradients)
        assert self._graph is not None
        self._graph.replay()
        return self._loss.clone()

    def _capture(self, actions: Sequence[Action], micro_batches: Sequence[MicroBatch]) -> None:
        stage = self._stage
        self._inputs = [
            {name: torch.empty_like(value, device=stage.device) for name, value in micro_batch.items()}
            for micro_batch in micro_batches
        ]
        weight = stage.loss_weight
        self._loss_weight = weight.clone() if isinstance(weight, torch.Tensor) else weight
        self._fill(micro_batches)
        stage.loss_weight = self._loss_weight
        self._graph, self._loss = self._record(lambda: self._run(actions, self._inputs))
        self._gradients = [block.gradient.owned() for block in stage.sharded.trained]

    def _fill(self, micro_batches: Sequence[MicroBatch]) -> None:
        for there, micro_batch in zip(self._inputs, micro_batches, strict=True):
            for name, value in micro_batch.items():
                there[name].copy_(value, non_blocking=True)
        if isinstance(self._loss_weight, torch.Tensor):
            self._loss_weight.copy_(self._stage.loss_weight)

    def _forget(self) -> None:
        if self._graph is not None:
            self._graph.reset()
        self._graph, self._inputs, self._gradients = None, [], []


def _key(micro_batches: Sequence[Mapping[str, torch.Tensor]], loss_weight: float | torch.Tensor) -> Any:
    """What a graph has for good."""
    weight = None if isinstance(loss_weight, torch.Tensor) else loss_weight
    return weight, [sorted((name, value.shape) for name, value in each.items()) for each in micro_batches]

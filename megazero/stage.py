"""One rank's share of the model as the pipeline executor drives it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megazero.models.context import ContextBuilder
from megazero.models.gpt import GPT
from megazero.tensor_parallel.mappings import TensorParallel
from megazero.zero.sharded import ShardedModel

MicroBatch = Mapping[str, torch.Tensor]
"""One micro-batch of B sequences as a batch source gives it, on the CPU: ``tokens`` (B, S + 1) int64, ``weights``
(B, S) float32, ``samples`` (B,) int64 and, where documents are kept apart, ``positions`` and ``documents`` (B, S)."""


class DecoderStage:
    """The decoder's layers of one pipeline stage, with their parameters under ZeRO.

    ``loss_weight``: what each token's loss is multiplied by before backward: a number or a scalar tensor.
    """

    def __init__(
        self, model: GPT, sharded: ShardedModel, contexts: ContextBuilder, tp: TensorParallel, device: torch.device
    ) -> None:
        self.model, self.sharded, self.tp, self.device = model, sharded, tp, device
        self.contexts = contexts
        self.loss_weight: float | torch.Tensor = 1.0

    def forward(self, micro_batch: MicroBatch, x: torch.Tensor | None) -> torch.Tensor:
        """Hidden states (T or T/tp, H) of the stage before, None on the first → this stage's; a scalar on the last."""
        self.sharded.begin_forward()
        tensors = {name: value.to(self.device, non_blocking=True) for name, value in micro_batch.items()}
        tokens = tensors["tokens"]
        context = self.contexts(
            tokens.shape[0], tensors.get("positions"), tensors.get("documents"), tensors.get("samples")
        )
        if context.dropout_key is not None:
            context = context._replace(dropout_key=self.tp.slice_tokens(context.dropout_key))
        x = self.model(tokens[:, :-1].flatten() if x is None else x, context)
        if self.model.head is not None:
            weights = tensors["weights"].flatten() * self.loss_weight
            x = self.model.head(x, tokens[:, 1:].flatten(), weights)
        self.sharded.end_forward()
        return x

    def backward(self, output: torch.Tensor, gradient: torch.Tensor | None) -> None:
        self.sharded.begin_backward()
        torch.autograd.backward(output, gradient)
        self.sharded.finish_backward()

    def gather(self) -> None:
        self.sharded.gather()

    def reduce(self) -> None:
        self.sharded.reduce_in_next_backward()

"""One rank's share of the model as the pipeline executor drives it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch

from megazero.models.context import ContextBuilder
from megazero.models.gpt import GPT
from megazero.tensor_parallel.mappings import TensorParallel
from megazero.tensor_parallel.weight_products import ProbedLinear, Product, catch_products, probed_linears
from megazero.zero.sharded import ShardedModel

MicroBatch = Mapping[str, torch.Tensor]
"""One micro-batch of B sequences as a batch source gives it, on the CPU: ``tokens`` (B, S + 1) int64, ``weights``
(B, S) float32, ``samples`` (B,) int64 and, where documents are kept apart, ``positions`` and ``documents`` (B, S)."""


class DecoderStage:
    """The decoder's layers of one pipeline rank, with their parameters under ZeRO.

    ``chunks``: the layers, by global index, that run between one transfer and the next: of one stage or of several.
    ``catches``: gradients of the layers' matrices are made here and not by autograd. ``splits_backward``: they are left
    to ``backward_weight``, and need to be caught.

    ``loss_weight``: what each token's loss is multiplied by before backward: a number or a scalar tensor.
    """

    def __init__(
        self,
        model: GPT,
        chunks: Sequence[range],
        sharded: ShardedModel,
        contexts: ContextBuilder,
        tp: TensorParallel,
        device: torch.device,
        catches: bool,
        splits_backward: bool = False,
    ) -> None:
        self.model, self.chunks, self.sharded, self.tp, self.device = model, chunks, sharded, tp, device
        self.contexts = contexts
        # By unit, the last first; those of an embedding or of the head are none.
        self._linears = [
            [linear for module in unit.plan.modules for linear in probed_linears(module)]
            for unit in reversed(sharded.units)
        ]
        self._put_off: deque[dict[ProbedLinear, Product]] | None = deque() if splits_backward else None
        for layer in model.layers.values() if catches else ():
            # In a forward of somebody's own, between steps, gradients are made as whoever asks autograd for them says.
            catch_products(layer, self._caught, lambda: sharded.in_forward)
        self._abandoned = False
        self.loss_weight: float | torch.Tensor = 1.0

    def forward(self, micro_batch: MicroBatch, x: torch.Tensor | None, chunk: int) -> torch.Tensor:
        """Hidden states (T or T/tp, H) of the stage before, None on the first → this stage's; a scalar on the last."""
        if self._abandoned:
            self._forget()
        self.sharded.begin_forward(chunk)
        tensors = {name: value.to(self.device, non_blocking=True) for name, value in micro_batch.items()}
        tokens = tensors["tokens"]
        context = self.contexts(
            tokens.shape[0], tensors.get("positions"), tensors.get("documents"), tensors.get("samples")
        )
        if context.dropout_key is not None:
            context = context._replace(dropout_key=self.tp.slice_tokens(context.dropout_key))
        x = tokens[:, :-1].flatten() if x is None else x
        x = self.model(x, context, self.chunks[chunk])
        if self.model.head is not None and chunk == len(self.chunks) - 1:
            weights = tensors["weights"].flatten() * self.loss_weight
            x = self.model.head(x, tokens[:, 1:].flatten(), weights)
        self.sharded.end_forward()
        return x

    def backward(self, output: torch.Tensor, gradient: torch.Tensor | None, chunk: int) -> None:
        self.sharded.begin_backward(chunk)
        torch.autograd.backward(output, gradient)
        self.sharded.finish_backward()

    def backward_input(self, output: torch.Tensor, gradient: torch.Tensor | None, chunk: int) -> None:
        assert self._put_off is not None
        self._put_off.append({})
        self.sharded.begin_backward(chunk, completes=False)
        torch.autograd.backward(output, gradient)
        self.sharded.finish_backward()

    def backward_weight(self, chunk: int) -> None:
        assert self._put_off is not None
        products = self._put_off.popleft()
        self.sharded.begin_backward(chunk)
        for unit, linears in zip(reversed(range(len(self.sharded.units))), self._linears, strict=True):
            for linear in linears:
                if linear in products:
                    self._make_gradient(products.pop(linear))
            self.sharded.unit_complete(unit)
        self.sharded.finish_backward()

    def abandon(self) -> None:
        """A step has ended in an error. What it has left behind is forgotten where another begins, and not here, where
        other ranks need not come."""
        self._abandoned = True
        self.sharded.abandon_forward()
        self.sharded.abandon_backward()

    def _forget(self) -> None:
        self._abandoned = False
        self.sharded.forget_gradients()
        self.sharded.end_step()
        for _, parameter in self.sharded.named_parameters():
            parameter.grad = None
        if self._put_off is not None:
            self._put_off.clear()

    def _caught(self, products: Sequence[Product]) -> None:
        """A layer's backward has made what its matrices' gradients are products of."""
        assert self.sharded.in_backward
        for product in products:
            if self._put_off is None:
                self._make_gradient(product)
            else:
                self._put_off[-1][product.linear] = product

    def _make_gradient(self, product: Product) -> None:
        """And let go of what it is made of."""
        if product.grad is not None and product.inside is not None:
            self.sharded.add_product(product.linear.weight, product.grad.t(), product.inside)
        product.grad = product.inside = None

    def gather(self) -> None:
        self.sharded.gather()

    def reduce(self) -> None:
        self.sharded.reduce_in_next_backward()

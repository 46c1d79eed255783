"""Linears whose weights' gradients are made later than their inputs': backward in two parts, for the pipeline schedules
that put the second one off (Qi et al. 2023, arXiv 2401.10241).

[Note: probes]
A layer's backward may be a compiled graph, which can put nothing aside. So all that a weight's gradient is made of
passes the graph's borders as a tensor: what the linear multiplies, as one more output of forward (an attribute of the
module), and the gradient of its result, as that of one more input: a probe that no result depends on and no memory
stands behind. Where the probe was made, outside, the gradient is caught.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import ProcessGroup

from megazero.tensor_parallel.mappings import (
    TensorParallel,
    gather_tokens,
    partial_product,
    rounded,
    sum_over_ranks,
)


class DeferringLinear(nn.Module):
    """A linear that leaves its weight's gradient to others while it has a ``probe``; ``inside`` is then what it has
    multiplied last: (T, local in_features), T all tokens."""

    weight: nn.Parameter
    tp: TensorParallel
    probe: torch.Tensor | None = None
    inside: torch.Tensor | None = None


class _Linear(torch.autograd.Function):
    """column_linear or row_linear of tensor_parallel.linear, but for the gradients: the weight has none, the probe has
    that of the result, of all tokens. ``inside``: x, gathered."""

    @staticmethod
    def forward(ctx, x, inside, weight, bias, probe, group, sequence_parallel, column):
        ctx.save_for_backward(weight)
        ctx.group, ctx.sequence_parallel, ctx.column = group, sequence_parallel, column
        ctx.has_bias, ctx.dtype = bias is not None, x.dtype
        if column or group is None:
            return F.linear(inside, weight, bias)
        y = sum_over_ranks(partial_product(inside, weight.t()), group, sequence_parallel)
        return rounded(y if bias is None else y + bias, x.dtype)

    @staticmethod
    def backward(ctx, grad):
        (weight,) = ctx.saved_tensors
        grad_bias = grad.sum(0) if ctx.has_bias else None
        if ctx.group is None:
            grad_x = grad @ weight
        elif ctx.column:
            grad_x = sum_over_ranks(partial_product(grad, weight), ctx.group, ctx.sequence_parallel)
            grad_x = rounded(grad_x, ctx.dtype)
        else:
            grad = gather_tokens(grad, ctx.group, ctx.sequence_parallel)
            grad_x = grad @ weight
        return grad_x, None, None, grad_bias, grad, None, None, None


def deferring_linear(module: DeferringLinear, x: torch.Tensor, bias: torch.Tensor | None, column: bool) -> torch.Tensor:
    """As column_linear or row_linear, while ``module`` has a probe."""
    tp = module.tp
    group: ProcessGroup | None = tp.group if tp.size > 1 else None
    gathers = column and group is not None
    module.inside = gather_tokens(x.detach(), group, tp.sequence_parallel) if gathers else x.detach()
    return _Linear.apply(x, module.inside, module.weight, bias, module.probe, group, tp.sequence_parallel, column)


class _Probe(torch.autograd.Function):
    """A tensor of ``shape`` without values, whose gradient ``product`` is given."""

    @staticmethod
    def forward(ctx, anchor, product, shape):
        ctx.product = product
        return anchor.new_empty(()).expand(shape)

    @staticmethod
    def backward(ctx, grad):
        ctx.product.grad = grad
        return None, None, None


class _Product:
    """What a weight's gradient of one micro-batch is made of: gradᵀ · inside."""

    grad: torch.Tensor | None = None
    inside: torch.Tensor | None = None


class DeferredWeights:
    """The weights' gradients of some linears that are still to be made, by micro-batch in the order of forwards."""

    def __init__(self, linears: Sequence[DeferringLinear]) -> None:
        self._linears = linears
        self._pending: deque[list[_Product]] = deque()

    @contextmanager
    def forward(self, tokens: int) -> Iterator[None]:
        """Around the forward of one micro-batch of so many tokens."""
        anchor = torch.ones((), dtype=self._linears[0].weight.dtype, device=self._linears[0].weight.device)
        anchor.requires_grad_()
        products = [_Product() for _ in self._linears]
        for linear, product in zip(self._linears, products, strict=True):
            linear.probe = _Probe.apply(anchor, product, (tokens, linear.weight.shape[0]))
        try:
            yield
        finally:
            for linear, product in zip(self._linears, products, strict=True):
                product.inside, linear.inside, linear.probe = linear.inside, None, None
        self._pending.append(products)

    def take(self) -> dict[DeferringLinear, _Product]:
        """Those of the first micro-batch that they have not yet been taken of."""
        return dict(zip(self._linears, self._pending.popleft(), strict=True))


def make_gradient(linear: DeferringLinear, product: _Product) -> None:
    """Give the weight its gradient of one micro-batch, and let go of what it is made of."""
    assert product.grad is not None and product.inside is not None
    linear.weight.grad = product.grad.t() @ product.inside
    product.grad = product.inside = None

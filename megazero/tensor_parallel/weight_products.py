"""Linears whose weights' gradients are made outside of autograd: products that end in the gradient buffer, unrounded
and added to what is there, with no copy between.

They are made as soon as a layer's backward has run, or later, for the pipeline schedules that put them off (Qi et al.
2023, arXiv 2401.10241).

[Note: probes]
A layer's backward may be a compiled graph, which knows no buffer that is there only from then on, and can put nothing
aside. So all that a weight's gradient is made of passes the graph's borders as a tensor: what the linear multiplies, as
one more output of forward (an attribute of the module), and the gradient of its result, as that of one more input: a
probe that no result depends on and no memory stands behind. Where the probes of a layer were made, outside, the
gradients are caught. The probes are made of the layer's input: autograd so takes the input's gradient for whole, and
the layer for complete, only when the products are caught.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

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

Join = Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, torch.Tensor]]
"""Parts (T, columns) of a gradient → the whole of it, (T, all columns), and its sum over the tokens."""


def join(parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """As Join, in plain operations."""
    whole = torch.cat(tuple(parts), dim=-1)
    return whole, whole.sum(0)


class ProbedLinear(nn.Module):
    """A linear that leaves its weight's gradient to others while it has a ``probe``: that of the first use in a
    forward, whose input is then ``inside``, (T, local in_features), T all tokens. ``join``: for results taken in parts.
    """

    weight: nn.Parameter
    tp: TensorParallel
    probe: torch.Tensor | None = None
    inside: torch.Tensor | None = None
    join: Join = staticmethod(join)

    def is_probed(self, x: torch.Tensor, column: bool) -> bool:
        """Whether a use on ``x`` is one whose weight's gradient is left to others: the first, of all tokens. What a
        forward of somebody's own does besides, with other shapes or dtypes, is autograd's."""
        if self.probe is None or self.inside is not None:
            return False
        if not x.is_meta and torch.is_autocast_enabled(x.device.type):
            return False
        tokens = self.probe.shape[0]
        return x.shape[:-1] == (self.tp.local_tokens(tokens) if column else tokens,)


class Product:
    """What a weight's gradient of one micro-batch is made of: gradᵀ · inside."""

    def __init__(self, linear: ProbedLinear) -> None:
        self.linear = linear
        self.grad: torch.Tensor | None = None
        self.inside: torch.Tensor | None = None


class _Linear(torch.autograd.Function):
    """column_linear or row_linear of tensor_parallel.linear, cut into ``sizes`` columns, but for the gradients: the
    weight has none, the probe has that of the result, of all tokens. ``inside``: x, gathered."""

    @staticmethod
    def forward(ctx, x, inside, weight, bias, probe, sizes, join, group, sequence_parallel, column):
        # Of what is inside autograd watches that nobody changes it in place before its product is made.
        ctx.save_for_backward(weight, inside)
        ctx.join, ctx.group, ctx.sequence_parallel, ctx.column = join, group, sequence_parallel, column
        ctx.has_bias, ctx.dtype = bias is not None, x.dtype
        if column or group is None:
            y = F.linear(inside, weight, bias)
            # A view, even of all of it, may not be changed in place by whoever gets it from a Function.
            return tuple(y.split(sizes, dim=-1)) if len(sizes) > 1 else (y,)
        y = sum_over_ranks(partial_product(inside, weight.t()), group, sequence_parallel)
        return (rounded(y if bias is None else y + bias, x.dtype),)

    @staticmethod
    def backward(ctx, *grads):
        weight, _ = ctx.saved_tensors
        grad_bias = None
        if len(grads) == 1:
            grad = grads[0]
            grad_bias = grad.sum(0) if ctx.has_bias else None
        elif ctx.has_bias:
            grad, grad_bias = ctx.join(grads)
        else:
            grad = torch.cat(grads, dim=-1)
        if ctx.group is None:
            grad_x = grad @ weight
        elif ctx.column:
            grad_x = sum_over_ranks(partial_product(grad, weight), ctx.group, ctx.sequence_parallel)
            grad_x = rounded(grad_x, ctx.dtype)
        else:
            grad = gather_tokens(grad, ctx.group, ctx.sequence_parallel)
            grad_x = grad @ weight
        return grad_x, None, None, grad_bias, grad, None, None, None, None, None


def probed_linear(
    module: ProbedLinear, x: torch.Tensor, bias: torch.Tensor | None, sizes: Sequence[int], column: bool
) -> tuple[torch.Tensor, ...]:
    """As column_linear or row_linear, in parts of ``sizes`` columns, while ``module`` has a probe."""
    tp = module.tp
    group: ProcessGroup | None = tp.group if tp.size > 1 else None
    gathers = column and group is not None
    module.inside = gather_tokens(x.detach(), group, tp.sequence_parallel) if gathers else x.detach()
    return _Linear.apply(
        x,
        module.inside,
        module.weight,
        bias,
        module.probe,
        list(sizes),
        module.join,
        group,
        tp.sequence_parallel,
        column,
    )


class _Probes(torch.autograd.Function):
    """Tensors of (``tokens``, out_features) without values, one for each product, which is given its gradient."""

    @staticmethod
    def forward(ctx, x, tokens, products, caught):
        ctx.products, ctx.caught = products, caught
        ctx.set_materialize_grads(False)
        nothing = x.new_empty(())
        return tuple(nothing.expand(tokens, product.linear.weight.shape[0]) for product in products)

    @staticmethod
    def backward(ctx, *grads):
        for product, grad in zip(ctx.products, grads, strict=True):
            product.grad = grad
        ctx.caught(ctx.products)
        return None, None, None, None


def probed_linears(module: nn.Module) -> list[ProbedLinear]:
    """The linears in a module that can leave their weights' gradients to others."""
    return [linear for linear in module.modules() if isinstance(linear, ProbedLinear)]


def _is_autograds(linear: ProbedLinear) -> bool:
    """Whether the weight has no gradient (it is frozen), or somebody is to see, or to change, the one that autograd
    makes: by hooks, or because the weight is computed from another parameter (torch.nn.utils.parametrize)."""
    weight = linear._parameters.get("weight")
    if weight is None or not weight.requires_grad:
        return True
    return bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)


def own_forward(module: nn.Module) -> MethodType:
    """That of its class."""
    return MethodType(type(module).forward, module)


class _WithProbes:
    """The forward of a layer whose products are caught; a copy of the layer, in no engine, has its class's own."""

    def __init__(
        self, layer: nn.Module, caught: Callable[[list[Product]], Any], catches: Callable[[], bool] | None
    ) -> None:
        self._layer, self._forward, self._caught, self._catches = layer, layer.forward, caught, catches
        self._linears = probed_linears(layer)
        for linear in self._linears:
            # The compiler takes an attribute of the class for another one than the module's own of the same value.
            linear.probe = linear.inside = None

    def __reduce__(self) -> tuple:
        return own_forward, (self._layer,)

    def __call__(self, x: torch.Tensor, *args: Any) -> torch.Tensor:
        if not (torch.is_grad_enabled() and x.requires_grad):
            return self._forward(x, *args)
        if self._catches is not None and not self._catches():
            return self._forward(x, *args)
        tp = self._linears[0].tp
        tokens = x.shape[0] * (tp.size if tp.sequence_parallel else 1)
        products = [Product(linear) for linear in self._linears if not _is_autograds(linear)]
        for product, probe in zip(products, _Probes.apply(x, tokens, products, self._caught), strict=True):
            product.linear.probe = probe
        try:
            return self._forward(x, *args)
        finally:
            for product in products:
                linear = product.linear
                product.inside, linear.inside, linear.probe = linear.inside, None, None


def catch_products(
    layer: nn.Module, caught: Callable[[list[Product]], Any], catches: Callable[[], bool] | None = None
) -> None:
    """From here on ``caught`` is called in each backward of the layer, a module of hidden states (T or T/tp, H), with
    what the gradients of its linears' weights are made of; autograd makes none of these. Goes around compiled layers.

    ``catches``: asked in each forward, whose backward is autograd's alone if the answer is no.
    """
    layer.forward = _WithProbes(layer, caught, catches)

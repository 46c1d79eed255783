"""The two matrix products at the borders of a tensor-parallel region, with the collective that belongs to each.

[Note: partial products are added in float32]
One rank alone rounds a product to bfloat16 once. Partial products that are each rounded before they are added, and
again after, would move every activation of the model, and losses by several times what a change of the micro-batch
size does; added in float32 and rounded once, they give the same activations to a few in ten thousand.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megazero.tensor_parallel.mappings import TensorParallel, gather_tokens, partial_product, rounded, sum_over_ranks


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, group, sequence_parallel):
        x = gather_tokens(x, group, sequence_parallel)
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        ctx.has_bias = bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_x = partial_product(grad, weight)
        grad_x = rounded(sum_over_ranks(grad_x, ctx.group, ctx.sequence_parallel), x.dtype)
        grad_bias = grad.sum(0) if ctx.has_bias else None
        return grad_x, grad.t() @ x, grad_bias, None, None


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, group, sequence_parallel):
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        ctx.has_bias = bias is not None
        y = sum_over_ranks(partial_product(x, weight.t()), group, sequence_parallel)
        return rounded(y if bias is None else y + bias, x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_bias = grad.sum(0) if ctx.has_bias else None
        grad = gather_tokens(grad, ctx.group, ctx.sequence_parallel)
        return grad @ weight, grad.t() @ x, grad_bias, None, None


class _LeaveRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, sequence_parallel):
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        return sum_over_ranks(x, group, sequence_parallel)

    @staticmethod
    def backward(ctx, grad):
        return gather_tokens(grad, ctx.group, ctx.sequence_parallel), None, None


def column_linear(
    x_TH: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tp: TensorParallel
) -> torch.Tensor:
    """(T or T/tp, H) outside → (T, local features) inside; ``weight`` (local features, H)."""
    if tp.size == 1:
        return F.linear(x_TH, weight, bias)
    return _ColumnLinear.apply(x_TH, weight, bias, tp.group, tp.sequence_parallel)


def row_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tp: TensorParallel) -> torch.Tensor:
    """(T, local features) inside → (T or T/tp, H) outside; ``weight`` (H, local features). The bias is added once."""
    if tp.size == 1:
        return F.linear(x, weight, bias)
    return _RowLinear.apply(x, weight, bias, tp.group, tp.sequence_parallel)


def leave_region(x_TH: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """(T, H) of which each element is zero on all ranks but one → (T or T/tp, H)."""
    return x_TH if tp.size == 1 else _LeaveRegion.apply(x_TH, tp.group, tp.sequence_parallel)

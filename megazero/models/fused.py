"""Pieces of a layer whose backward is one pass over memory on a GPU, for compiled layers alone.

Torch's compiler sums gradients over the tokens (those of biases and of a norm's weights) in passes of their own, or
joins them to passes that then read what another has read already. Here such a sum leaves with the gradient it is of.
Forward passes are plain operations, which the compiler fuses.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

from megazero.models.mlp import gelu_by_sigmoid

ROWS, COLUMNS, TILES = 32, 128, 16  # a tile of the MLP's inner features, and how many a program takes, downwards
MOST_FEATURES = 4096  # of a norm whose row, with the sums of its column, fits the registers of a program


@triton.jit
def _gelu_backward(
    grad_ptr,
    product_ptr,
    bias_ptr,
    out_ptr,
    sums_ptr,
    rows,
    columns,
    slope: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    tiles: tl.constexpr,
):
    column = tl.program_id(0) * tile_columns + tl.arange(0, tile_columns)[None, :]
    first = tl.program_id(1).to(tl.int64) * tile_rows * tiles + tl.arange(0, tile_rows)[:, None]
    bias = tl.load(bias_ptr + column, column < columns, other=0.0).to(tl.float32)
    sums = tl.zeros((tile_rows, tile_columns), tl.float32)
    for tile in range(tiles):
        row = first + tile * tile_rows
        inside = (row < rows) & (column < columns)
        at = row * columns + column
        x = tl.load(product_ptr + at, inside, other=0.0).to(tl.float32) + bias
        grad = tl.load(grad_ptr + at, inside, other=0.0).to(tl.float32)
        s = tl.sigmoid(slope * (x + 0.044715 * x * x * x))
        grad *= s + x * s * (1 - s) * slope * (1 + 3 * 0.044715 * x * x)
        tl.store(out_ptr + at, grad.to(out_ptr.dtype.element_ty), inside)
        sums += grad
    total = tl.sum(sums, 0)[None, :]
    tl.store(sums_ptr + tl.program_id(1) * columns + column, total, column < columns)


@triton_op("megazero::bias_gelu", mutates_args={})
def _bias_gelu(product: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return gelu_by_sigmoid(product + bias)


@triton_op("megazero::bias_gelu_backward", mutates_args={})
def _bias_gelu_backward(
    grad: torch.Tensor, product: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = product.shape
    programs = triton.cdiv(columns, COLUMNS), triton.cdiv(rows, ROWS * TILES)
    out = torch.empty_like(product)
    sums = torch.empty(programs[1], columns, dtype=torch.float32, device=product.device)
    wrap_triton(_gelu_backward)[programs](
        grad,
        product,
        bias,
        out,
        sums,
        rows,
        columns,
        slope=math.sqrt(8 / math.pi),
        tile_rows=ROWS,
        tile_columns=COLUMNS,
        tiles=TILES,
        num_warps=8,
    )
    return out, sums


def _save_gelu(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward_of_gelu(ctx, grad):
    product, bias = ctx.saved_tensors
    grad_product, sums = torch.ops.megazero.bias_gelu_backward(grad.contiguous(), product.contiguous(), bias)
    return grad_product, sums.sum(0).to(bias.dtype)


_bias_gelu.register_autograd(_backward_of_gelu, setup_context=_save_gelu)


def bias_gelu(product: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """GELU, in its tanh form, of (T, F) products and their (F,) bias → (T, F)."""
    return _bias_gelu(product, bias)


@triton.jit
def _norm_backward(
    grad_sum_ptr,
    grad_normed_ptr,
    sum_ptr,
    mean_ptr,
    scale_ptr,
    weight_ptr,
    out_ptr,
    weight_sums_ptr,
    bias_sums_ptr,
    rows,
    features,
    rows_each,
    width: tl.constexpr,
):
    feature = tl.arange(0, width)
    inside = feature < features
    weight = tl.load(weight_ptr + feature, inside, other=0.0).to(tl.float32)
    weight_sum = tl.zeros((width,), tl.float32)
    bias_sum = tl.zeros((width,), tl.float32)
    first = tl.program_id(0) * rows_each
    at = first.to(tl.int64) * features + feature
    for row in range(first, tl.minimum(first + rows_each, rows)):
        grad = tl.load(grad_normed_ptr + at, inside, other=0.0).to(tl.float32)
        x = tl.load(sum_ptr + at, inside, other=0.0).to(tl.float32)
        passed = tl.load(grad_sum_ptr + at, inside, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr + row)
        x = tl.where(inside, (x - tl.load(mean_ptr + row)) * scale, 0.0)
        weight_sum += grad * x
        bias_sum += grad
        grad *= weight
        along, plain = tl.sum(grad * x, 0) / features, tl.sum(grad, 0) / features
        out = passed + (grad - plain - x * along) * scale
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), inside)
        at += features
    partial = tl.program_id(0) * features + feature
    tl.store(weight_sums_ptr + partial, weight_sum, inside)
    tl.store(bias_sums_ptr + partial, bias_sum, inside)


@triton_op("megazero::add_norm", mutates_args={})
def _add_norm(
    x: torch.Tensor, branch: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    total = x + branch
    wide = total.float()
    mean = wide.mean(-1, keepdim=True)
    scale = (wide.var(-1, correction=0, keepdim=True) + eps).rsqrt()
    normed = ((wide - mean) * scale * weight + bias).to(x.dtype)
    return total, normed, mean, scale


@triton_op("megazero::add_norm_backward", mutates_args={})
def _add_norm_backward(
    grad_total: torch.Tensor,
    grad_normed: torch.Tensor,
    total: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, features = total.shape
    width = triton.next_power_of_2(features)
    rows_each = max(8, triton.cdiv(rows, 2048))
    programs = triton.cdiv(rows, rows_each)
    out = torch.empty_like(total)
    weight_sums = torch.empty(programs, features, dtype=torch.float32, device=total.device)
    bias_sums = torch.empty_like(weight_sums)
    wrap_triton(_norm_backward)[(programs,)](
        grad_total,
        grad_normed,
        total,
        mean,
        scale,
        weight,
        out,
        weight_sums,
        bias_sums,
        rows,
        features,
        rows_each,
        width=width,
        num_warps=4 if width <= 1024 else 8,
    )
    return out, weight_sums, bias_sums


def _save_norm(ctx, inputs, output):
    total, _, mean, scale = output
    ctx.save_for_backward(total, mean, scale, inputs[2])
    ctx.set_materialize_grads(True)


def _backward_of_norm(ctx, grad_total, grad_normed, grad_mean, grad_scale):
    total, mean, scale, weight = ctx.saved_tensors
    grad, weight_sums, bias_sums = torch.ops.megazero.add_norm_backward(
        grad_total.contiguous(), grad_normed.contiguous(), total.contiguous(), mean, scale, weight
    )
    return grad, grad, weight_sums.sum(0).to(weight.dtype), bias_sums.sum(0).to(weight.dtype), None


_add_norm.register_autograd(_backward_of_norm, setup_context=_save_norm)


def add_norm(
    x: torch.Tensor, branch: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(T, H) and what a branch adds to it → their sum, and that under layer normalisation; both in their dtype."""
    total, normed, _, _ = _add_norm(x, branch, weight, bias, eps)
    return total, normed

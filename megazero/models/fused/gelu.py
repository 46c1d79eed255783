"""GELU of products and their bias, and back with the bias's gradient."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

ROWS, COLUMNS, TILES = 32, 128, 16  # backward's tile of the inner features, and how many a program takes, downwards
FORWARD_ROWS, FORWARD_COLUMNS = 8, 512  # forward's tile: a program takes one
SLOPE = math.sqrt(8 / math.pi)


@triton.jit
def _gelu_forward(
    product_ptr,
    bias_ptr,
    out_ptr,
    rows,
    columns,
    slope: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    across = tl.cdiv(columns, tile_columns)
    column = tl.program_id(0) % across * tile_columns + tl.arange(0, tile_columns)[None, :]
    row = (tl.program_id(0) // across).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)[:, None]
    inside = (row < rows) & (column < columns)
    at = row * columns + column
    bias = tl.load(bias_ptr + column, column < columns, other=0.0).to(tl.float32)
    x = tl.load(product_ptr + at, inside, other=0.0).to(tl.float32) + bias
    y = x * tl.sigmoid(slope * (x + 0.044715 * x * x * x))
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), inside)


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
    rows, columns = product.shape
    product, bias = product.contiguous(), bias.contiguous()
    out = torch.empty_like(product)
    # In one dimension: a grid's second has no more than 65535 programs, which are half a million tokens.
    programs = triton.cdiv(columns, FORWARD_COLUMNS) * triton.cdiv(rows, FORWARD_ROWS)
    wrap_triton(_gelu_forward)[(programs,)](
        product,
        bias,
        out,
        rows,
        columns,
        slope=SLOPE,
        tile_rows=FORWARD_ROWS,
        tile_columns=FORWARD_COLUMNS,
        num_warps=8,
    )
    return out


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
        slope=SLOPE,
        tile_rows=ROWS,
        tile_columns=COLUMNS,
        tiles=TILES,
        num_warps=8,
    )
    return out, sums


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad):
    product, bias = ctx.saved_tensors
    grad_product, sums = torch.ops.megazero.bias_gelu_backward(
        grad.contiguous(), product.contiguous(), bias.contiguous()
    )
    return grad_product, sums.sum(0).to(bias.dtype)


_bias_gelu.register_autograd(_backward, setup_context=_save)


def bias_gelu(product: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """GELU, in its tanh form, of (T, F) products and their (F,) bias → (T, F)."""
    return _bias_gelu(product, bias)

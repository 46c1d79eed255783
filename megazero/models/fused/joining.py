"""Parts of a gradient put together, with the sum over its rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

ROWS, COLUMNS, TILES = 32, 128, 16  # a tile, and how many a program takes, downwards


@triton.jit
def _copy_and_sum(
    part_ptr,
    out_ptr,
    sums_ptr,
    rows,
    columns,
    part_stride,
    out_stride,
    start,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    tiles: tl.constexpr,
):
    column = tl.program_id(0) * tile_columns + tl.arange(0, tile_columns)[None, :]
    first = tl.program_id(1).to(tl.int64) * tile_rows * tiles + tl.arange(0, tile_rows)[:, None]
    sums = tl.zeros((tile_rows, tile_columns), tl.float32)
    for tile in range(tiles):
        row = first + tile * tile_rows
        inside = (row < rows) & (column < columns)
        values = tl.load(part_ptr + row * part_stride + column, inside, other=0.0)
        tl.store(out_ptr + row * out_stride + start + column, values, inside)
        sums += values.to(tl.float32)
    total = tl.sum(sums, 0)[None, :]
    tl.store(sums_ptr + tl.program_id(1) * out_stride + start + column, total, column < columns)


@triton_op("megazero::join", mutates_args={})
def _join(parts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    rows, sizes = parts[0].shape[0], [part.shape[1] for part in parts]
    out = torch.empty(rows, sum(sizes), dtype=parts[0].dtype, device=parts[0].device)
    down = triton.cdiv(rows, ROWS * TILES)
    sums = torch.empty(down, sum(sizes), dtype=torch.float32, device=out.device)
    start = 0
    for part, columns in zip(parts, sizes, strict=True):
        part = part if part.stride(1) == 1 else part.contiguous()
        wrap_triton(_copy_and_sum)[triton.cdiv(columns, COLUMNS), down](
            part,
            out,
            sums,
            rows,
            columns,
            part.stride(0),
            out.stride(0),
            start,
            tile_rows=ROWS,
            tile_columns=COLUMNS,
            tiles=TILES,
            num_warps=4,
        )
        start += columns
    return out, sums


def join(parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Parts (T, columns) → the whole of them, (T, all columns), and its sum over the tokens, in their dtype."""
    whole, sums = torch.ops.megazero.join(list(parts))
    return whole, sums.sum(0).to(whole.dtype)

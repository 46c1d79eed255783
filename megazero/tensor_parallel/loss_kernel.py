"""Cross-entropy over the rows of a matrix of logits on a GPU, one program to a row: the row crosses memory once.

It is read for the softmax's sum, each lane with a maximum of its own so far (Milakov, Gimelshein 2018, arXiv
1805.02867, section 3), and read again, from the cache, to be overwritten by its gradient. Few rows are under way at a
time, so that those of a large vocabulary are still in the cache then.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.distributed import ProcessGroup

LANES, WARPS = 1024, 16
VECTOR = 8  # elements a lane takes together: 16 bytes of a 16-bit dtype


@triton.jit
def _cross_entropy(
    logits_ptr,
    targets_ptr,
    weights_ptr,
    loss_ptr,
    columns,
    valid,
    with_grad: tl.constexpr,
    lanes: tl.constexpr,
    vector: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * columns
    target, weight = tl.load(targets_ptr + row), tl.load(weights_ptr + row)
    # Before the reductions, which all threads wait in: later another thread may have put its gradient there.
    here = (target >= 0) & (target < valid)
    chosen = tl.load(row_ptr + target, here, other=0.0).to(tl.float32)
    at = tl.arange(0, lanes)[:, None] * vector + tl.arange(0, vector)[None, :]
    maximum = tl.full((lanes,), -3.0e38, tl.float32)  # finite, or a lane without a column would make NaN of -inf + inf
    total = tl.zeros((lanes,), tl.float32)
    for first in range(0, valid, lanes * vector):
        column = first + at
        x = tl.load(row_ptr + column, column < valid, other=float("-inf"), eviction_policy="evict_last").to(tl.float32)
        higher = tl.maximum(maximum, tl.max(x, 1))
        total = total * tl.exp(maximum - higher) + tl.sum(tl.exp(x - higher[:, None]), 1)
        maximum = higher
    highest = tl.max(maximum, 0)
    sum_of_row = tl.sum(total * tl.exp(maximum - highest), 0)
    tl.store(loss_ptr + row, (tl.log(sum_of_row) - tl.where(here, chosen - highest, 0.0)) * weight)
    if with_grad:
        scale = weight / sum_of_row
        for first in range(0, columns, lanes * vector):
            column = first + at
            x = tl.load(row_ptr + column, column < valid, other=float("-inf")).to(tl.float32)
            gradient = tl.exp(x - highest) * scale - tl.where(here & (column == target), weight, 0.0)
            tl.store(row_ptr + column, gradient.to(logits_ptr.dtype.element_ty), column < columns)


def chunk_loss(
    x_CH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_C: torch.Tensor,
    weights_C: torch.Tensor,
    start: int,
    valid: int,
    group: ProcessGroup | None,
    with_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``cross_entropy.chunk_loss``, for a vocabulary that is not cut."""
    assert start == 0 and group is None
    logits_CV = x_CH @ weight_VH.t()
    rows, columns = logits_CV.shape
    loss_C = torch.empty(rows, dtype=torch.float32, device=x_CH.device)
    _cross_entropy[(rows,)](
        logits_CV,
        targets_C.contiguous(),
        weights_C.contiguous(),
        loss_C,
        columns,
        valid,
        with_grad=with_grad,
        lanes=LANES,
        vector=VECTOR,
        num_warps=WARPS,
    )
    return loss_C, logits_CV if with_grad else logits_CV.new_empty(0)

"""The two borders of a tensor-parallel region, and what happens to activations and gradients there.

Inside the region each rank holds its share of the features of all T tokens. Outside, every rank holds all
features: of all tokens, or, with sequence parallelism, of its T/tp tokens (Korthikanti et al. 2022,
arXiv 2205.05198, section 4.2.2; Shoeybi et al. 2019, arXiv 1909.08053, section 3). Tokens are dim 0, so that
gathers and scatters copy nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup

from megazero import comm


@dataclass(frozen=True)
class TensorParallel:
    """One rank's place in its tensor-parallel group.

    ``group`` is None for a group of one, or where a rank is only described and nothing will run.
    """

    size: int = 1
    rank: int = 0
    sequence_parallel: bool = False
    group: ProcessGroup | None = None

    def local_tokens(self, tokens: int) -> int:
        """How many of a micro-batch's T tokens lie on this rank outside the region."""
        return tokens // self.size if self.sequence_parallel else tokens

    def slice_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """(T, …) → this rank's tokens outside the region."""
        if not self.sequence_parallel:
            return x
        n = self.local_tokens(x.shape[0])
        return x[self.rank * n : (self.rank + 1) * n]


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return comm.all_reduce(grad, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return comm.all_reduce(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return comm.all_gather(x, group)

    @staticmethod
    def backward(ctx, grad):
        return comm.reduce_scatter(grad, ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return comm.reduce_scatter(x, group)

    @staticmethod
    def backward(ctx, grad):
        return comm.all_gather(grad, ctx.group), None


def enter_region(x: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """(T or T/tp, H) outside → (T, H) inside. Backward sums the ranks' gradients."""
    if tp.size == 1:
        return x
    return _Gather.apply(x, tp.group) if tp.sequence_parallel else _Copy.apply(x, tp.group)


def leave_region(x: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """(T, H) partial sums inside → (T or T/tp, H) whole outside."""
    if tp.size == 1:
        return x
    return _Scatter.apply(x, tp.group) if tp.sequence_parallel else _Reduce.apply(x, tp.group)

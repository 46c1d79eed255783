"""The two borders of a tensor-parallel region, and what crosses them.

Inside the region each rank holds its share of the features of all T tokens. Outside, every rank holds all
features: of all tokens, or, with sequence parallelism, of its T/tp tokens (Korthikanti et al. 2022,
arXiv 2205.05198, section 4.2.2; Shoeybi et al. 2019, arXiv 1909.08053, section 3). Tokens are dim 0, so that
gathers and scatters copy nothing. The functions here know no autograd: linear.py and the layers give them one.
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


def gather_tokens(x: torch.Tensor, group: ProcessGroup, sequence_parallel: bool) -> torch.Tensor:
    """What a rank holds outside → all T tokens."""
    return comm.all_gather(x, group) if sequence_parallel else x


def sum_over_ranks(x: torch.Tensor, group: ProcessGroup, sequence_parallel: bool) -> torch.Tensor:
    """Partial sums (T, …) of all ranks → their sum, as a rank holds it outside."""
    return comm.reduce_scatter(x, group) if sequence_parallel else comm.all_reduce(x, group)


def partial_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b in float32, whatever the dtype of the operands."""
    if a.dtype == torch.float32:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a @ b, ``total`` float32: in the product's own pass where there is a kernel for it."""
    if a.is_cuda and a.dtype != torch.float32:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += a @ b


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x`` in ``dtype``.

    [Note: no cast without effect in an autograd.Function] torch.compile of torch 2.11 takes the result of a ``.to``
    that changes nothing for a detached tensor: a Function whose forward returns it gets zeros for a gradient, silently.
    """
    return x if x.dtype == dtype else x.to(dtype)

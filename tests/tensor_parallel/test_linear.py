"""The borders of a tensor-parallel region: values, and gradients as if there were one rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import distributed as dist

from megazero.tensor_parallel.linear import column_linear, leave_region, row_linear
from megazero.tensor_parallel.mappings import TensorParallel

TOKENS, OUTSIDE, INSIDE = 8, 3, 12


def integers(seed: int, *shape: int) -> torch.Tensor:
    """So that sums are exact in any order."""
    return torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(seed)).float()


def place(sequence: bool) -> TensorParallel:
    size = dist.get_world_size()
    return TensorParallel(size, dist.get_rank(), sequence and size > 1, dist.group.WORLD if size > 1 else None)


def rank_slice(x: torch.Tensor, tp: TensorParallel, dim: int) -> torch.Tensor:
    return x.chunk(tp.size, dim)[tp.rank].clone()


def into_the_region(sequence: bool) -> list[torch.Tensor]:
    """Output, then gradients of input, weight and bias."""
    tp = place(sequence)
    x = tp.slice_tokens(integers(0, TOKENS, OUTSIDE)).clone().requires_grad_()
    weight = rank_slice(integers(1, INSIDE, OUTSIDE), tp, 0).requires_grad_()
    bias = rank_slice(integers(2, INSIDE), tp, 0).requires_grad_()
    y = column_linear(x, weight, bias, tp)
    y.backward(rank_slice(integers(3, TOKENS, INSIDE), tp, 1))
    return [y.detach(), x.grad, weight.grad, bias.grad]


def out_of_the_region(sequence: bool) -> list[torch.Tensor]:
    tp = place(sequence)
    x = rank_slice(integers(0, TOKENS, INSIDE), tp, 1).requires_grad_()
    weight = rank_slice(integers(1, OUTSIDE, INSIDE), tp, 1).requires_grad_()
    bias = integers(2, OUTSIDE).requires_grad_()
    y = row_linear(x, weight, bias, tp)
    y.backward(tp.slice_tokens(integers(3, TOKENS, OUTSIDE)))
    return [y.detach(), x.grad, weight.grad, bias.grad]


def plain(inside: int, outside: int) -> list[torch.Tensor]:
    x = integers(0, TOKENS, outside).requires_grad_()
    weight, bias = integers(1, inside, outside).requires_grad_(), integers(2, inside).requires_grad_()
    y = F.linear(x, weight, bias)
    y.backward(integers(3, TOKENS, inside))
    return [y.detach(), x.grad, weight.grad, bias.grad]


SIZES = pytest.mark.parametrize(("size", "sequence"), [(1, False), (2, False), (2, True), (4, False), (4, True)])


@SIZES
def test_into_the_region(ranks: Callable, size: int, sequence: bool) -> None:
    y, grad_x, grad_weight, grad_bias = plain(INSIDE, OUTSIDE)
    for rank, found in enumerate(ranks(size, into_the_region, sequence)):
        tp = TensorParallel(size, rank, sequence)
        assert torch.equal(found[0], rank_slice(y, tp, 1))
        assert torch.equal(found[1], tp.slice_tokens(grad_x))
        assert torch.equal(found[2], rank_slice(grad_weight, tp, 0))
        assert torch.equal(found[3], rank_slice(grad_bias, tp, 0))


@SIZES
def test_out_of_the_region(ranks: Callable, size: int, sequence: bool) -> None:
    """The bias is added once. Under sequence parallelism its gradient is a share, of the rank's own tokens."""
    y, grad_x, grad_weight, grad_bias = plain(OUTSIDE, INSIDE)
    results = ranks(size, out_of_the_region, sequence)
    for rank, found in enumerate(results):
        tp = TensorParallel(size, rank, sequence)
        assert torch.equal(found[0], tp.slice_tokens(y))
        assert torch.equal(found[1], rank_slice(grad_x, tp, 1))
        assert torch.equal(found[2], rank_slice(grad_weight, tp, 1))
        assert sequence or torch.equal(found[3], grad_bias)
    if sequence:
        assert torch.equal(sum(found[3] for found in results), grad_bias)


def leave(sequence: bool) -> tuple[torch.Tensor, torch.Tensor]:
    tp = place(sequence)
    share = integers(20 + tp.rank, TOKENS, OUTSIDE).requires_grad_()
    outside = leave_region(share, tp)
    outside.backward(tp.slice_tokens(integers(1, TOKENS, OUTSIDE)))
    return outside.detach(), share.grad


@SIZES
def test_leaving_sums_the_shares_and_gives_each_the_whole_gradient(ranks: Callable, size: int, sequence: bool) -> None:
    summed = sum(integers(20 + rank, TOKENS, OUTSIDE) for rank in range(size))
    for rank, (outside, grad) in enumerate(ranks(size, leave, sequence)):
        assert torch.equal(outside, TensorParallel(size, rank, sequence).slice_tokens(summed))
        assert torch.equal(grad, integers(1, TOKENS, OUTSIDE))


def bf16_products(sequence: bool) -> torch.Tensor:
    """Shares of 256 and 1 on two ranks: only one of them survives a rounding to bf16 before the sum, both after."""
    tp = place(sequence)
    x = torch.full((2, 1), 256.0 if tp.rank == 0 else 1.0).bfloat16()
    last = torch.full((1, 1), 1.0 if tp.rank == 0 else 1.0078125).bfloat16()  # 1 + 2⁻⁷
    return row_linear(x, last, torch.ones(1).bfloat16(), tp)


@pytest.mark.parametrize("sequence", [False, True])
def test_shares_in_bf16_are_rounded_after_the_sum_and_the_bias(ranks: Callable, sequence: bool) -> None:
    """256 + 1.0078125 + 1 = 258.0078125 rounds to 258; rounded share by share, 256 + 1.0078125 would be 256 or 258."""
    for found in ranks(2, bf16_products, sequence):
        assert found.dtype == torch.bfloat16 and (found == 258).all()


def test_tokens_of_a_rank_are_its_slice_in_order() -> None:
    x = integers(0, TOKENS, OUTSIDE)
    parts = [TensorParallel(4, rank, True).slice_tokens(x) for rank in range(4)]
    assert torch.equal(torch.cat(parts), x) and {len(part) for part in parts} == {2}
    assert TensorParallel(4, 1, True).local_tokens(8) == 2
    assert TensorParallel(4, 1, False).slice_tokens(x) is x and TensorParallel(4, 1, False).local_tokens(8) == 8

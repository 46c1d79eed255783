"""The border products give the same gradients inside a torch.compile graph as in eager code."""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist

from megazero.tensor_parallel.linear import column_linear, row_linear
from megazero.tensor_parallel.mappings import TensorParallel


def gradients(sequence_parallel: bool, compiled: bool) -> list[torch.Tensor]:
    tp = TensorParallel(2, dist.get_rank(), sequence_parallel, dist.group.WORLD)
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = 4 if sequence_parallel else 8
    leaves = [
        torch.randn(shape, generator=generator, requires_grad=True)
        for shape in ((tokens, 4), (6, 4), (6,), (4, 6), (4,))
    ]

    def block(x, inner, inner_bias, outer, outer_bias):
        return x + row_linear(column_linear(x, inner, inner_bias, tp).sin(), outer, outer_bias, tp)

    function = torch.compile(block, fullgraph=True, backend="aot_eager") if compiled else block
    function(*leaves).square().sum().backward()
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_compiled_gradients_are_those_of_eager(ranks, sequence_parallel: bool) -> None:
    eager, compiled = (ranks(2, gradients, sequence_parallel, compiled) for compiled in (False, True))
    for rank in range(2):
        for ours, theirs in zip(compiled[rank], eager[rank], strict=True):
            assert theirs.abs().max() > 0
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)

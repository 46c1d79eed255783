"""One block's gradient buffer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megazero.sharding import whole
from megazero.zero.flat import FlatLayout
from megazero.zero.gradient import GradientBuffer, write_product

ROWS, COLUMNS, TOKENS = 7, 5, 40


def factors(dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(TOKENS, n, generator=generator).to(dtype) for n in (ROWS, COLUMNS))


@pytest.mark.parametrize(
    ("dtype", "buffer", "last"),
    [
        (torch.float32, torch.float32, 1e-6),
        (torch.bfloat16, torch.float32, 2**-8),
        (torch.float16, torch.float32, 2**-10),
        (torch.bfloat16, torch.bfloat16, 2**-7),
    ],
)
def test_a_product_ends_in_a_part_of_a_buffer(dtype: torch.dtype, buffer: torch.dtype, last: float) -> None:
    """Written over what is there, then added to it, to the last place of the dtype that a CPU multiplies in."""
    flat = torch.full((3 + ROWS * COLUMNS + 2,), float("nan"), dtype=buffer)
    out, wanted = flat[3:-2].view(ROWS, COLUMNS), torch.zeros(ROWS, COLUMNS, dtype=torch.float64)
    for seed in range(3):
        left, right = factors(dtype, seed)
        write_product(out, left.t(), right, adds=seed > 0)
        wanted += left.double().t() @ right.double()
        assert float((out.double() - wanted).abs().max()) <= (seed + 1) * last * float(wanted.abs().max())
    assert flat[:3].isnan().all() and flat[-2:].isnan().all()


def test_products_and_autograds_gradients_add_up() -> None:
    """In any order; what has neither is zero, and so are the gaps."""
    weight, other, bias = (nn.Parameter(torch.zeros(shape)) for shape in ((ROWS, COLUMNS), (3,), (2,)))
    parameters = {"weight": weight, "other": other, "bias": bias}
    layout = FlatLayout.build("block", {name: whole(name, tuple(p.shape)) for name, p in parameters.items()}, 1)
    owned = (0, layout.numel)
    ordered = [parameters[entry.name] for entry in layout.entries]
    gradient = GradientBuffer(layout, ordered, False, owned, owned, torch.float32, torch.device("cpu"), None)
    at = {entry.name: i for i, entry in enumerate(layout.entries)}
    left, right = factors(torch.float32, 0)
    weight.grad, bias.grad = torch.ones(ROWS, COLUMNS), torch.full((2,), 5.0)
    gradient.move()
    gradient.add_product(at["weight"], left.t(), right)
    weight.grad = torch.full((ROWS, COLUMNS), 2.0)
    gradient.accumulate()
    whole_gradient = gradient.owned()
    found = {e.name: whole_gradient[e.start : e.end].clone() for e in layout.entries}
    torch.testing.assert_close(found["weight"].view(ROWS, COLUMNS), 3 + left.t() @ right)
    assert found["bias"].tolist() == [5, 5] and found["other"].tolist() == [0, 0, 0]
    assert all(bool((whole_gradient[a:b] == 0).all()) for a, b in layout.gaps())
    assert weight.grad is bias.grad is None
    gradient.drop()
    assert not gradient.present

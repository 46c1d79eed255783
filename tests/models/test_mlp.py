"""The MLP's activations against torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megazero.models.mlp import gelu_by_sigmoid


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 5e-3)]
)
def test_gelu_by_sigmoid_is_gelu_by_tanh(dtype: torch.dtype, tolerance: float) -> None:
    """Values and gradients, against float64; far from zero too, where a tanh is 1."""
    x = torch.cat([torch.linspace(-9, 9, 2001), torch.tensor([-1e4, -60.0, 60.0, 1e4])]).to(dtype).requires_grad_()
    exact = x.detach().double().requires_grad_()
    y, wanted = gelu_by_sigmoid(x), F.gelu(exact, approximate="tanh")
    y.sum().backward()
    wanted.sum().backward()
    assert y.dtype == dtype
    for ours, theirs in ((y, wanted.detach()), (x.grad, exact.grad)):
        assert ((ours.detach().double() - theirs).abs() <= tolerance * theirs.abs().clamp(min=3)).all()

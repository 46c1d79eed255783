"""Norms against the formula in float64, with inputs whose statistics bfloat16 cannot hold."""

from __future__ import annotations

import pytest
import torch

from megazero.models.norm import HeadNorm, LayerNorm, RMSNorm


def layer_norm(x: torch.Tensor, norm: LayerNorm) -> torch.Tensor:
    x = x.double()
    centred = x - x.mean(-1, keepdim=True)
    scale = (centred.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    return centred * scale * norm.weight.double() + norm.bias.double()


def rms_norm(x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "formula"), [(LayerNorm, layer_norm), (RMSNorm, rms_norm), (HeadNorm, rms_norm)])
def test_statistics_are_float32(kind: type, formula, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    norm = kind(384, 1e-5).to(dtype)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(384, generator=generator))
    x = (30 + torch.randn(5, 3, 384, generator=generator)).to(dtype)
    y = norm(x)
    assert y.dtype == dtype
    expected = formula(x, norm)
    # One rounding to the output's dtype, and float32's own error in subtracting a mean of 30.
    torch.testing.assert_close(y.double(), expected, rtol=torch.finfo(dtype).eps, atol=2e-5)

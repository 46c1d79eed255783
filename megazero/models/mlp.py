"""The feed-forward block of a layer."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from megazero.models import registry
from megazero.models.config import ModelConfig
from megazero.models.layers import ProjectIn, ProjectOut
from megazero.models.parts import mlp_parts


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """SiLU(gate) · up (Shazeer 2020, arXiv:2002.05202)."""
    return F.silu(gate) * up


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU in its tanh form (Hendrycks, Gimpel 2016, arXiv:1606.08415, section 2)."""
    # The tanh that torch's compiler calls on a GPU takes longer than to move the tensor through memory.
    if torch.compiler.is_compiling() and x.is_cuda:
        return gelu_by_sigmoid(x)
    return F.gelu(x, approximate="tanh")


def gelu_by_sigmoid(x: torch.Tensor) -> torch.Tensor:
    """The same function: x σ(√(8/π) (x + 0.044715 x³)), in float32 inside (float64 where the input is)."""
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    return (y * torch.sigmoid(math.sqrt(8 / math.pi) * (y + 0.044715 * y * y * y))).to(x.dtype)


_BUILTIN: dict[str, Callable[..., torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "relu": F.relu,
    "silu": F.silu,
    "swiglu": swiglu,
}
assert _BUILTIN.keys() == registry.BUILTIN_ACTIVATIONS.keys()


class MLP(nn.Module):
    """down(activation(inner(x))); ``inner`` projects to ``up``, or to ``gate`` and ``up``.

    ``bias_activation``: the activation of ``inner``'s products and its bias in one, where a build has put one.
    """

    bias_activation: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.inner = ProjectIn(config.hidden_size, mlp_parts(config), config.mlp_bias)
        name = config.activation
        self.activation = _BUILTIN[name] if name in _BUILTIN else registry.activation_function(name)
        self.down = ProjectOut(config.ffn_size, config.hidden_size, config.mlp_bias)

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        """(T, H) → (T, H)."""
        if self.bias_activation is None:
            return self.down(self.activation(*self.inner(x_TH)))
        (products,) = self.inner(x_TH, with_bias=False)
        return self.down(self.bias_activation(products, self.inner.bias))

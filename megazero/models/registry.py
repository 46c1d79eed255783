"""Names that ``model.activation`` and ``model.attention`` may take, and how a user's own file adds to them.

Pure Python, no torch: what a name means for a model's parameters is known without building it. Call the
``register_*`` functions when your file is imported, in every process, before the configuration is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megazero.errors import ConfigError, near
from megazero.models.config import ModelConfig

if TYPE_CHECKING:
    import torch

    from megazero.models.attention import Attention
    from megazero.models.parts import Part

# name → whether it multiplies a gate into the inner features
BUILTIN_ACTIVATIONS = {"gelu": False, "gelu_tanh": False, "relu": False, "silu": False, "swiglu": True}
BUILTIN_ATTENTION = "softmax"


@dataclass(frozen=True)
class _Activation:
    function: Callable[..., torch.Tensor]
    gated: bool


@dataclass(frozen=True)
class _AttentionVariant:
    variant: type[Attention]
    extra_parts: Callable[[ModelConfig], Sequence[Part]] | None


_activations: dict[str, _Activation] = {}
_attentions: dict[str, _AttentionVariant] = {}


def register_activation(name: str, function: Callable[..., torch.Tensor], gated: bool = False) -> None:
    """Let ``model.activation: name`` mean ``function``.

    ``function(up)`` or, where ``gated``, ``function(gate, up)``: (T, F) tensors in, (T, F) out, each
    element on its own, since tensor parallelism gives a rank a slice of F. A later call replaces an earlier
    one; the built-in names are refused with ConfigError.
    """
    if name in BUILTIN_ACTIVATIONS:
        raise ConfigError.single("model.activation", f"{name!r} is built in; register yours under another name")
    _activations[name] = _Activation(function, gated)


def register_attention(
    name: str, variant: type[Attention], extra_parts: Callable[[ModelConfig], Sequence[Part]] | None = None
) -> None:
    """Let ``model.attention: name`` build ``variant``, a subclass of megazero.models.attention.Attention.

    ``extra_parts(config)`` lists what the variant projects from the residual stream besides q, k and v; each
    is a parameter of its own (``layers.N.attention.<part>``), initialised, sharded and saved as those are. A
    later call replaces an earlier one; the built-in name is refused with ConfigError.
    """
    if name == BUILTIN_ATTENTION:
        raise ConfigError.single("model.attention", f"{name!r} is built in; register yours under another name")
    _attentions[name] = _AttentionVariant(variant, extra_parts)


def problems(config: ModelConfig) -> list[tuple[str, str]]:
    """(field, message) for each name of ``config`` that is neither built in nor registered."""
    found = []
    activations = (*BUILTIN_ACTIVATIONS, *_activations)
    if config.activation not in activations:
        found.append(("model.activation", _unknown(config.activation, activations)))
    attentions = (BUILTIN_ATTENTION, *_attentions)
    if config.attention not in attentions:
        found.append(("model.attention", _unknown(config.attention, attentions)))
    return found


def is_gated(activation: str) -> bool:
    """Whether the MLP has a ``gate`` besides ``up``. ConfigError for an unknown name."""
    if activation in BUILTIN_ACTIVATIONS:
        return BUILTIN_ACTIVATIONS[activation]
    return _registered_activation(activation).gated


def activation_function(activation: str) -> Callable[..., torch.Tensor]:
    """The function registered under a name that is not built in. ConfigError for an unknown name."""
    return _registered_activation(activation).function


def attention_variant(attention: str) -> type[Attention]:
    """The class registered under a name that is not built in. ConfigError for an unknown name."""
    return _registered_attention(attention).variant


def extra_attention_parts(config: ModelConfig) -> tuple[Part, ...]:
    """What the config's attention projects besides q, k and v. ConfigError for an unknown name."""
    if config.attention == BUILTIN_ATTENTION:
        return ()
    extra_parts = _registered_attention(config.attention).extra_parts
    return tuple(extra_parts(config)) if extra_parts else ()


def _registered_activation(name: str) -> _Activation:
    if name not in _activations:
        raise ConfigError.single("model.activation", _unknown(name, (*BUILTIN_ACTIVATIONS, *_activations)))
    return _activations[name]


def _registered_attention(name: str) -> _AttentionVariant:
    if name not in _attentions:
        raise ConfigError.single("model.attention", _unknown(name, (BUILTIN_ATTENTION, *_attentions)))
    return _attentions[name]


def _unknown(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    close = near(name, names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{name!r} is not known; {hint}choose one of {', '.join(names)}, or register it before the config is read"

"""What a PipelineModule is given for a layer, and how layers are divided into stages by that alone."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from megazero.errors import ConfigError
from megazero.pipeline.partition import partition_layers


class LayerSpec:
    """A layer that is built where it is needed: ``typename(*module_args, **module_kwargs)``."""

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            kind = getattr(typename, "__name__", repr(typename))
            raise ConfigError.single("layers", f"{type(self).__name__} of {kind}; give a class of torch.nn.Module's")
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.typename.__name__})"

    def build(self) -> nn.Module:
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer that is one with all others of its ``key``, on whichever stages they are.

    ``forward_fn(module, x)``: what is computed in place of the module's own forward. Every parameter of the module is
    tied, those named by ``tied_weight_attr`` and the rest: in one process it is one module.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = "weight",
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn, self.tied_weight_attr = key, forward_fn, tied_weight_attr


Layer = LayerSpec | nn.Module | Callable[[Any], Any]
"""A spec, a module, or a function of what the layer before gives."""


def type_name(layer: Layer) -> str:
    if isinstance(layer, LayerSpec):
        return layer.typename.__name__
    return type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__name__", type(layer).__name__)


def brought(layer: Layer) -> Iterator[nn.Parameter]:
    """Parameters that are there before the layer is built: a module's own, and those of what a spec is given."""
    if isinstance(layer, LayerSpec):
        yield from _parameters([layer.module_args, layer.module_kwargs])
    elif isinstance(layer, nn.Module):
        yield from layer.parameters()


def within_reach(function: Callable) -> Iterator[nn.Parameter]:
    """Parameters that a function may use without being given them: of what it is bound to or closes over."""
    if isinstance(function, partial):
        yield from _parameters([function.args, function.keywords])
        yield from within_reach(function.func)
        return
    held = [getattr(function, "__self__", None), getattr(function, "__defaults__", None)]
    try:
        around = inspect.getclosurevars(function)
    except (TypeError, ValueError):  # not written in Python
        return
    yield from _parameters([*held, around.nonlocals, around.globals])


def _parameters(values: Any) -> Iterator[nn.Parameter]:
    for value in tree_leaves(values):
        if isinstance(value, nn.Parameter):
            yield value
        elif isinstance(value, nn.Module):
            yield from value.parameters()


def divide(layers: Sequence[Layer], stages: int, method: str) -> list[range]:
    """The layers of each stage: contiguous, at least one each, the dearest stage as cheap as may be.

    ``method``: ``uniform`` counts layers; ``parameters``, those of their parameters that are trained; ``type:REGEX``,
    the layers whose class's name the expression is found in, in either case of letters. Raises ConfigError.
    """
    if stages > len(layers):
        raise ConfigError.single(
            "num_stages", f"{stages} stages cannot share {len(layers)} layers; use at most {len(layers)}"
        )
    if stages == 1:
        return [range(len(layers))]
    kind, _, expression = str(method).partition(":")
    if kind.lower() == "uniform":
        costs = [1] * len(layers)
    elif kind.lower() == "parameters":
        costs = [_trained_parameters(layer) for layer in layers]
    elif kind.lower() == "type" and expression:
        costs = _matches(layers, expression)
    else:
        told = f"{method!r} is not known; use uniform, parameters, or type: and a regular expression"
        raise ConfigError.single("partition_method", told)
    return partition_layers(costs, 0, 0, stages)


def _matches(layers: Sequence[Layer], expression: str) -> list[int]:
    try:
        pattern = re.compile(expression, re.IGNORECASE)
    except re.error as error:
        raise ConfigError.single("partition_method", f"{expression!r} is no regular expression: {error}") from None
    found = [int(pattern.search(type_name(layer)) is not None) for layer in layers]
    if not any(found):
        names = ", ".join(dict.fromkeys(map(type_name, layers)))
        raise ConfigError.single(
            "partition_method", f"type:{expression} is found in no layer's class; there are {names}"
        )
    return found


def _trained_parameters(layer: Layer) -> int:
    module = _without_values(layer) if isinstance(layer, LayerSpec) else layer
    parameters = module.parameters() if isinstance(module, nn.Module) else ()
    return sum(parameter.numel() for parameter in parameters if parameter.requires_grad)


def _without_values(spec: LayerSpec) -> nn.Module:
    """The layer without values; built whole, and let go at once, where it cannot be made without."""
    try:
        with torch.device("meta"):
            return spec.build()
    except Exception:
        return spec.build()

"""Where a parameter's values are kept: in a block of an engine's, or in slices from before there is an engine.

[Note: homes]
Users hand bare parameters to the functions of megazero.zero. What belongs to one is looked up here rather than in an
attribute of it, which would travel into pickles and copies. The table keeps nothing alive.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from megazero.zero.block import Block
    from megazero.zero.flat import Entry
    from megazero.zero.sharded import ShardedModel

EXTERNAL = "_external_parameters"
"""Attribute of a module: parameters of others that its forward uses."""

_homes = WeakIdKeyDictionary()


@dataclass(frozen=True)
class InEngine:
    """``index``: of the block that holds the parameter; ``engine``: what trains it."""

    model: weakref.ref[ShardedModel]
    index: int
    engine: weakref.ref[Any] | None = None

    @property
    def sharded(self) -> ShardedModel:
        sharded = self.model()
        assert sharded is not None, "the hooks of the model keep it"
        return sharded

    @property
    def block(self) -> Block:
        return self.sharded.blocks[self.index]

    def entry_of(self, parameter: nn.Parameter) -> Entry:
        """Its place in the block."""
        return self.block.layout.entries[self.block.index_of(parameter)]

    def name_of(self, parameter: nn.Parameter) -> str:
        return self.entry_of(parameter).name


def home_of(parameter: nn.Parameter) -> Any:
    """An InEngine, a slices.Slice or Pending, or None where the parameter is whole and nobody's."""
    return _homes.get(parameter)


def settle(parameter: nn.Parameter, home: Any) -> None:
    _homes[parameter] = home


def leave(parameter: nn.Parameter) -> None:
    _homes.pop(parameter, None)


def settle_model(sharded: ShardedModel, engine: Any = None) -> None:
    """Every parameter of a model: in its block."""
    reference = weakref.ref(engine) if engine is not None else None
    for index, block in enumerate(sharded.blocks):
        for parameter in block.parameters:
            settle(parameter, InEngine(weakref.ref(sharded), index, reference))

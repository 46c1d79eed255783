"""How a model is divided into units, what is used as one, and a unit into blocks, what is stored as one."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megazero.sharding import ShardSpec


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered for the same stretch of forward and backward.

    ``specs``: by name. ``modules``: whose forwards use them; after the last of them has run the unit is done with.
    ``chunk``: the part of the model that they lie in, where a forward or backward runs one part of several.
    """

    name: str
    specs: Mapping[str, ShardSpec]
    modules: tuple[nn.Module, ...]
    chunk: int = 0

    def split(
        self, frozen: set[str], dtypes: Mapping[str, torch.dtype], persistence_threshold: int | None
    ) -> list[BlockPlan]:
        """The unit's blocks: what is trained apart from what is not, what stays gathered apart from what does not, each
        dtype by itself.

        ``frozen``: names of parameters that are not trained. ``persistence_threshold``: parameters of at most so many
        elements stay gathered; None where all do.
        """
        parts: dict[tuple[bool, bool, str], dict[str, ShardSpec]] = {}
        for name, spec in self.specs.items():
            persistent = persistence_threshold is None or spec.numel <= persistence_threshold
            parts.setdefault((name not in frozen, persistent, str(dtypes[name])), {})[name] = spec
        return [
            BlockPlan(self.name, specs, trainable, persistent, dtypes[next(iter(specs))])
            for (trainable, persistent, _), specs in sorted(parts.items(), reverse=True)
        ]


@dataclass(frozen=True)
class BlockPlan:
    """``specs``: the block's local parameters, by name. ``persistent``: whole on every rank between uses."""

    name: str
    specs: Mapping[str, ShardSpec]
    trainable: bool
    persistent: bool
    dtype: torch.dtype


def decoder_units(
    model: nn.Module, specs: Mapping[str, ShardSpec], chunks: Sequence[Container[int]] | None = None
) -> list[Unit]:
    """The units of one pipeline rank's share of a decoder, in the order of use in forward.

    ``chunks``: layers of each part that is run by itself; None: all are one.
    The word embedding is a unit of its own, also where it serves as the head of another stage, so that both
    copies have the same layout and are sharded alike.
    """
    word = "embedding.word.weight"

    def under(prefix: str) -> dict[str, ShardSpec]:
        return {name: spec for name, spec in specs.items() if name.startswith(prefix)}

    def chunk_of(layer: int) -> int:
        return next(i for i, layers in enumerate(chunks or (range(layer + 1),)) if layer in layers)

    tied_here = model.config.tie_word_embeddings and model.head is not None
    last = len(chunks or (None,)) - 1
    units = []
    if model.embedding is not None:
        modules = (model.embedding.word, model.head) if tied_here else (model.embedding.word,)
        units.append(Unit("embedding.word", {word: specs[word]}, modules))
        if model.embedding.position is not None:
            units.append(Unit("embedding.position", under("embedding.position."), (model.embedding.position,)))
    units += [
        Unit(f"layers.{i}", under(f"layers.{i}."), (layer,), chunk_of(int(i))) for i, layer in model.layers.items()
    ]
    if model.final_norm is not None:
        tail = under("final_norm.")
        head = under("head.")
        if model.config.tie_word_embeddings:
            units.append(Unit("final", tail, (model.final_norm,), last))
            if head:
                units.append(Unit("embedding.word", head, (model.head,), last))
        else:
            units.append(Unit("final", tail | head, (model.final_norm, model.head), last))
    assert sum(len(unit.specs) for unit in units) == len(specs), "a parameter lies in no unit, or in two"
    return units

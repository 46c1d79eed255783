"""How a decoder's stage is divided into blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from megazero.sharding import ShardSpec


@dataclass(frozen=True)
class BlockPlan:
    """``specs``: the block's local parameters, by name. ``entry``: the module whose forward uses them first."""

    name: str
    specs: Mapping[str, ShardSpec]
    entry: nn.Module


def decoder_blocks(model: nn.Module, specs: Mapping[str, ShardSpec]) -> list[BlockPlan]:
    """The blocks of one pipeline stage of a decoder, in the order of use in forward.

    The word embedding is a block of its own, also where it serves as the head of another stage, so that both
    copies have the same layout and are sharded alike.
    """
    word = "embedding.word.weight"

    def under(prefix: str) -> dict[str, ShardSpec]:
        return {name: spec for name, spec in specs.items() if name.startswith(prefix)}

    plans = []
    if model.embedding is not None:
        plans.append(BlockPlan("embedding.word", {word: specs[word]}, model.embedding.word))
        if model.embedding.position is not None:
            plans.append(BlockPlan("embedding.position", under("embedding.position."), model.embedding.position))
    plans += [BlockPlan(f"layers.{i}", under(f"layers.{i}."), layer) for i, layer in model.layers.items()]
    if model.final_norm is not None:
        tail = under("final_norm.")
        head = under("head.")
        if not model.config.tie_word_embeddings:
            tail, head = tail | head, {}
        plans.append(BlockPlan("final", tail, model.final_norm))
        if head:
            plans.append(BlockPlan("embedding.word", head, model.head))
    assert sum(len(plan.specs) for plan in plans) == len(specs), "a parameter lies in no block, or in two"
    return plans

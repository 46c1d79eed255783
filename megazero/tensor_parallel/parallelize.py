"""Turns a plain decoder into one rank's tensor-parallel share of it, module by module, by type alone."""

from __future__ import annotations

from torch import nn

from megazero.models.layers import Head, PositionEmbedding, ProjectIn, ProjectOut, WordEmbedding
from megazero.models.norm import HeadNorm
from megazero.sharding import ShardSpec, whole
from megazero.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    SlicedPositionEmbedding,
    VocabParallelEmbedding,
    VocabParallelHead,
    replicated,
)
from megazero.tensor_parallel.mappings import TensorParallel


def parallelize(model: nn.Module, tp: TensorParallel, vocab_multiple: int, tied: bool) -> dict[str, ShardSpec]:
    """Replace the matrices of a decoder on the meta device, in place; describe every local parameter.

    Args:
        vocab_multiple: each rank's vocabulary rows are padded to a multiple of this.
        tied: the head uses the word embedding's weight; where both are here they share one parameter.

    Returns:
        Local parameter name (``layers.3.attention.qkv.weight``) → ShardSpec, in the model's order.
    """
    specs: dict[str, ShardSpec] = {}
    for path, plain in list(model.named_modules()):
        module: nn.Module
        if isinstance(plain, ProjectIn):
            module = ColumnParallelLinear(plain, path, tp)
        elif isinstance(plain, ProjectOut):
            module = RowParallelLinear(plain, path, tp)
        elif isinstance(plain, WordEmbedding):
            module = VocabParallelEmbedding(plain, path, tp, vocab_multiple)
        elif isinstance(plain, PositionEmbedding):
            module = SlicedPositionEmbedding(plain, path, tp)
        elif isinstance(plain, Head):
            name = "embedding.word.weight" if tied else f"{path}.weight"
            module = VocabParallelHead(plain, name, tp, vocab_multiple)
        else:
            # Norms see a rank's own tokens under sequence parallelism, and a head's norm its own heads always.
            partial = tp.sequence_parallel or isinstance(plain, HeadNorm)
            for attribute, parameter in plain.named_parameters(recurse=False):
                name = f"{path}.{attribute}" if path else attribute
                specs[name] = replicated(whole(name, tuple(parameter.shape)), tp, partial)
            continue
        parent, _, attribute = path.rpartition(".")
        setattr(model.get_submodule(parent), attribute, module)
        specs.update({f"{path}.{attribute}": spec for attribute, spec in module.specs.items()})
    if tied and getattr(model, "embedding", None) is not None and getattr(model, "head", None) is not None:
        model.head.weight = model.embedding.word.weight
        del specs["head.weight"]
    return specs

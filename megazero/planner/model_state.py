"""Bytes of parameters, gradients and optimizer state on one rank: exactly from ShardSpec, or by size alone.

Nothing is built and no process group is needed: any rank of any layout can be described from anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megazero.build import describe_stage, rank_layers
from megazero.config import Config
from megazero.layout import Layout
from megazero.models.config import ModelConfig
from megazero.tensor_parallel.mappings import TensorParallel
from megazero.zero.blocks import decoder_units
from megazero.zero.flat import FlatLayout
from megazero.zero.offload.settings import Offload
from megazero.zero.offload.sizes import leaving_blocks

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
ON_DEVICE = Offload()


def optimizer_bytes(precision: str) -> int:
    """Per parameter: Adam's two moments in float32, and the master copy; in float32 the parameter is its own."""
    return 8 if precision == "fp32" else 12


def model_state_bytes(parameters: int, dp: int, stage: int, grad_bytes: int = 4, precision: str = "bf16") -> float:
    """Model state per rank of ``parameters`` elements over ``dp`` ranks at ZeRO ``stage``, padding apart.

    The formulas of Rajbhandari et al. 2020 (arXiv 1910.02054, section 5); with gradients of 2 bytes (``grad_bytes``)
    their table 1.
    """
    sizes = (optimizer_bytes(precision), grad_bytes, BYTES[precision])
    return parameters * sum(size / dp if stage >= least else size for least, size in enumerate(sizes, start=1))


@dataclass(frozen=True)
class ModelState:
    """Bytes that one rank holds when all gradients of a step are there.

    ``padding``: of all five together, and counted in none: what aligns parameters, makes slices equal and fills up
    the vocabulary. ``total`` is the size of the storages.
    """

    parameters: int
    gradients: int
    masters: int
    exp_avg: int
    exp_avg_sq: int
    padding: int

    @property
    def optimizer(self) -> int:
        return self.masters + self.exp_avg + self.exp_avg_sq

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.padding


class Buffer(NamedTuple):
    """A block's flat buffer. ``persistent``: whole on every rank between uses. ``trainable``: it has gradients and
    optimizer state."""

    layout: FlatLayout
    persistent: bool
    trainable: bool = True


@dataclass(frozen=True)
class StageBuffers:
    """``units``: the buffers of each unit, in the order of use; ``uses``: indices of units as forward uses them;
    ``chunks``: of each unit, the chunk of the rank's layers that it is used with."""

    units: tuple[tuple[Buffer, ...], ...]
    uses: tuple[int, ...]
    chunks: tuple[int, ...]

    @property
    def all(self) -> list[Buffer]:
        return [buffer for unit in self.units for buffer in unit]

    def of_chunk(self, chunk: int) -> list[Buffer]:
        """Those that a forward or backward of one chunk uses."""
        return [buffer for unit, own in zip(self.units, self.chunks) if own == chunk for buffer in unit]


def stage_buffers(config: Config, model: ModelConfig, layout: Layout, rank: int) -> StageBuffers:
    """The flat buffers of the layers that ``rank`` holds."""
    coordinates = layout.coordinates(rank)
    tp = TensorParallel(layout.tp, coordinates["tp"], config.sequence_parallel)
    decoder, specs = describe_stage(config, model, coordinates, tp)
    threshold = config.zero.stage3_param_persistence_threshold if config.zero.stage == 3 else None
    units = decoder_units(decoder, specs, rank_layers(config, model, coordinates["pp"]))
    shards = config.zero.mics_shard_size or layout.dp
    dtypes = dict.fromkeys(specs, torch.bfloat16)  # one for all; which, makes no difference to the layout
    buffers = tuple(
        tuple(
            Buffer(FlatLayout.build(plan.name, plan.specs, shards), plan.persistent)
            for plan in unit.split(set(), dtypes, threshold)
        )
        for unit in units
    )
    modules = [(module is decoder.head, index) for index, unit in enumerate(units) for module in unit.modules]
    uses = tuple(index for _, index in sorted(modules, key=lambda use: use[0]))
    return StageBuffers(buffers, uses, tuple(unit.chunk for unit in units))


def leaving_buffers(buffers: Sequence[Buffer], offload: Offload) -> set[int]:
    """Indices of those whose float32 state is kept off the device."""
    return leaving_blocks([buffer.layout.numel for buffer in buffers], offload)


def values_leave(buffer: Buffer, stage: int, offload: Offload) -> bool:
    """Whether its parameters are kept off the device."""
    return offload.parameters != "none" and stage >= 3 and not buffer.persistent


def model_state(
    buffers: Sequence[Buffer],
    dp_rank: int,
    stage: int,
    precision: str,
    grad_dtype: str = "fp32",
    offload: Offload = ON_DEVICE,
    accumulates: bool = True,
) -> ModelState:
    """What a rank at place ``dp_rank`` along dp holds of ``buffers`` on its device at ZeRO ``stage``, exactly.

    ``accumulates``: a step has several micro-batches. What leaves for the host is not counted; its gradients are there
    together only where several micro-batches' are added up whole, which is at stage 1.
    """
    held = [0] * 5
    padding = 0
    leaving = leaving_buffers(buffers, offload)
    for index, buffer in enumerate(buffers):
        layout, persistent, trainable = buffer
        away, leaves = values_leave(buffer, stage, offload), index in leaving
        # In float32 the parameter is its own master, where both are in the same place.
        moments = (0, 0, 0) if leaves else (4 if away else optimizer_bytes(precision) - 8, 4, 4)
        kinds = [
            (0 if away else BYTES[precision], stage >= 3 and not persistent),
            (0 if leaves and not (stage < 2 and accumulates) else BYTES[grad_dtype], stage >= 2),
            *((size, stage >= 1) for size in moments),
        ]
        for kind, (size, cut) in enumerate(kinds if trainable else kinds[:1]):
            start, end = layout.shard(dp_rank % layout.shards) if cut else (0, layout.numel)
            used = sum(last - first for first, last, _, _ in layout.pieces(start, end))
            held[kind] += used * size
            padding += (end - start - used) * size
    return ModelState(*held, padding=padding)

"""The memory of many layouts of one model: as planner.memory has it, to the byte, without building every layer of each.

All layers of a model are alike, so a stage's buffers follow from those of one layer and of the model's two ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from megazero.config import Config
from megazero.layout import Layout
from megazero.models.config import ModelConfig
from megazero.planner.activations import kernels
from megazero.planner.memory import StepMemory
from megazero.planner.model_state import ModelState, StageBuffers, model_state, stage_buffers
from megazero.planner.offload import block_shares
from megazero.zero.offload.settings import Offload
from megazero.zero.offload.sizes import host_state


class _Piece(NamedTuple):
    """The buffers of a stage of one layer. ``layer``: the index of the layer's unit."""

    buffers: StageBuffers
    layer: int

    def repeated(self, chunks: Sequence[int]) -> StageBuffers:
        """Those of a rank with so many layers in each of its chunks, but that all have one layer's name."""
        units, at, layers = self.buffers.units, self.layer, sum(chunks)
        uses: list[int] = []
        for unit in self.buffers.uses:
            uses += range(at, at + layers) if unit == at else [unit if unit < at else unit + layers - 1]
        own = [chunk for chunk, count in enumerate(chunks) for _ in range(count)]
        behind = len(units) - at - 1
        return StageBuffers(
            (*units[:at], *([units[at]] * layers), *units[at + 1 :]),
            tuple(uses),
            (*[0] * at, *own, *[len(chunks) - 1] * behind),
        )


class Needs(NamedTuple):
    """Bytes at the highest moment of a step on a pipeline rank's first rank."""

    peak: int
    rank: int
    state: ModelState


@lru_cache(maxsize=4096)
def _unlike(counts: tuple[int, ...], pp: int) -> list[int]:
    """The ends of the pipeline, and the first of those between them with the same layers."""
    inner = {counts[pp_rank::pp]: pp_rank for pp_rank in reversed(range(1, pp - 1))}
    return sorted({0, pp - 1, *inner.values()})


def _shorter(config: Config, layout: Layout) -> Config:
    """The same step with fewer micro-batches, where a pipeline's middle only repeats itself."""
    if config.schedule == "gpipe":
        return config
    unit, count = config.train.micro_batch_size * layout.dp, config.micro_batches(layout.dp)
    short = min(count, 3 * layout.pp + count % layout.pp)
    return config.model_copy(update={"train": config.train.model_copy(update={"global_batch_size": short * unit})})


class Memories:
    """Remembers, between layouts, what one layer and the model's ends take."""

    def __init__(self, model: ModelConfig) -> None:
        self.model = model
        self._pieces: dict[tuple, _Piece] = {}
        self._states: dict[tuple, tuple[ModelState, ModelState]] = {}
        self._buffers: dict[tuple, StageBuffers] = {}

    def fullest(self, config: Config, layout: Layout, counts: tuple[int, ...]) -> Needs:
        """The memory of the pipeline rank that needs most. ``counts``: layers of every stage of the model.

        Of ranks with equally many layers between the ends the first keeps the most activations: only it is asked.
        """
        found = [self.of_pp_rank(config, layout, counts, pp_rank) for pp_rank in _unlike(counts, layout.pp)]
        return max(found, key=lambda needs: needs.peak)

    def largest_state(self, config: Config, layout: Layout, counts: tuple[int, ...]) -> tuple[int, int]:
        """(bytes of model state, rank) of the pipeline rank that has most: no peak is below it."""
        found = []
        for pp_rank in _unlike(counts, layout.pp):
            state = self._state(self._key(config, layout, pp_rank), config, layout, counts[pp_rank :: layout.pp])
            found.append((state.total, layout.rank(pp_rank, 0, 0)))
        return max(found)

    def of_pp_rank(self, config: Config, layout: Layout, counts: tuple[int, ...], pp_rank: int) -> Needs:
        """The memory of a pipeline rank's first rank. ``config`` has its partition written out."""
        key, chunks = self._key(config, layout, pp_rank), counts[pp_rank :: layout.pp]
        buffers, kernel = self._repeated(key, config, layout, chunks), kernels(config, gpu=True)
        step = StepMemory(_shorter(config, layout), self.model, layout, pp_rank, kernel, buffers)
        state = self._state(key, config, layout, chunks)
        peak = state.total - step.gradients + max(map(sum, step.moments()))
        return Needs(peak, layout.rank(pp_rank, 0, 0), state)

    def host(self, config: Config, layout: Layout, counts: tuple[int, ...]) -> int:
        """Bytes of host memory on the pipeline rank that needs most, its first rank."""
        found, precision = [0], kernels(config, gpu=True).precision
        for pp_rank in _unlike(counts, layout.pp) if Offload.of(config.zero).active else ():
            buffers = self._repeated(self._key(config, layout, pp_rank), config, layout, counts[pp_rank :: layout.pp])
            offload = Offload.of(config.zero)
            shares = block_shares(buffers.all, config.zero.stage, precision, config.train.grad_dtype, offload)
            found.append(host_state(shares, offload, gpu=True).memory)
        return max(found)

    def _repeated(self, key: tuple, config: Config, layout: Layout, chunks: tuple[int, ...]) -> StageBuffers:
        if (key, chunks) not in self._buffers:
            self._buffers[key, chunks] = self._piece(key, config, layout).repeated(chunks)
        return self._buffers[key, chunks]

    def _state(self, key: tuple, config: Config, layout: Layout, chunks: tuple[int, ...]) -> ModelState:
        precision, layers = kernels(config, gpu=True).precision, sum(chunks)
        if (offload := Offload.of(config.zero)).active:
            buffers, grads = self._repeated(key, config, layout, chunks).all, config.train.grad_dtype
            accumulates = config.micro_batches(layout.dp) > 1
            return model_state(buffers, 0, config.zero.stage, precision, grads, offload, accumulates)
        settings = (key, config.zero.stage, precision, config.train.grad_dtype)
        if settings not in self._states:
            units, at = self._piece(key, config, layout)
            ends = [buffer for i, unit in enumerate(units.units) if i != at for buffer in unit]
            self._states[settings] = (
                model_state(ends, 0, config.zero.stage, precision, config.train.grad_dtype),
                model_state(units.units[at], 0, config.zero.stage, precision, config.train.grad_dtype),
            )
        outer, layer = (vars(part).values() for part in self._states[settings])
        return ModelState(*(a + layers * b for a, b in zip(outer, layer, strict=True)))

    @staticmethod
    def _key(config: Config, layout: Layout, pp_rank: int) -> tuple:
        threshold = config.zero.stage3_param_persistence_threshold if config.zero.stage == 3 else None
        ends = (pp_rank == 0, pp_rank == layout.pp - 1)
        return layout.tp, layout.dp, config.sequence_parallel, config.zero.mics_shard_size, threshold, ends

    def _piece(self, key: tuple, config: Config, layout: Layout) -> _Piece:
        if key not in self._pieces:
            first, last = key[-1]
            stages = 1 if first and last else 3
            stage = 0 if first else 2 if last else 1
            model = self.model.model_copy(update={"num_layers": stages})
            parallel = config.parallel.model_copy(update={"pp": stages, "virtual_pp": 1, "partition": (1,) * stages})
            small = Layout(layout.tp, stages, layout.dp)
            found = stage_buffers(
                config.model_copy(update={"parallel": parallel}), model, small, small.rank(stage, 0, 0)
            )
            layer = next(i for i, unit in enumerate(found.units) if unit[0].layout.name.startswith("layers."))
            self._pieces[key] = _Piece(found, layer)
        return self._pieces[key]

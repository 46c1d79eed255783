"""How much memory each rank of a run will need, from its settings alone: before a process or a GPU is taken.

Model state is exact. Activations follow from formulas that tests compare with what autograd keeps. Buffers are
estimates. The peak is the highest of a step's moments, since not everything is there at once: the first backward
fills gradient buffers while it empties activations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megazero.build import rank_layers, zero_settings
from megazero.config import Config
from megazero.layout import Layout
from megazero.models.config import ModelConfig
from megazero.pipeline.schedules import activation_bound, backward_order, forward_order
from megazero.planner.activations import Kernels, deferred_bytes, kernels, sizes, stage_activation_bytes
from megazero.planner.buffers import (
    bucket_elements,
    gathered_elements,
    layer_backward_bytes,
    loss_bytes,
    recomputed_bytes,
    unsharded_gradient_elements,
)
from megazero.planner.model_state import (
    BYTES,
    Buffer,
    ModelState,
    StageBuffers,
    leaving_buffers,
    model_state,
    stage_buffers,
    values_leave,
)
from megazero.planner.offload import block_shares
from megazero.zero.offload.settings import Offload
from megazero.zero.offload.sizes import HostState, host_state


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank. ``activations`` and ``buffers``: the most there is of each at any moment of a step; ``peak``:
    the most of everything at one moment, which is less than the sum. ``micro_batch``: activations of one micro-batch in
    each of the rank's chunks. ``host``: what is kept off the device, where anything is."""

    rank: int
    state: ModelState
    activations: int
    buffers: int
    peak: int
    micro_batch: tuple[int, ...]
    host: HostState | None = None


@dataclass(frozen=True)
class MemoryPlan:
    """``stages``: the first rank at every place along pp; all ranks at one place need the same."""

    layout: Layout
    stages: tuple[RankMemory, ...]
    gpu: bool

    @property
    def fullest(self) -> RankMemory:
        """The rank that needs most, the first of equals."""
        return max(self.stages, key=lambda memory: memory.peak)

    def of_rank(self, rank: int) -> RankMemory:
        return self.stages[self.layout.coordinates(rank)["pp"]]

    def describe(self) -> str:
        """A few lines for the start of a run."""
        fullest = self.fullest
        state = fullest.state
        place = "GPU" if self.gpu else "process"
        where = f" (pipeline stage {self.stages.index(fullest)}, which needs most)" if len(self.stages) > 1 else ""
        parts = [f"parameters {amount(state.parameters)}", f"gradients {amount(state.gradients)}"]
        parts.append(f"optimizer {amount(state.optimizer)}")
        if state.padding > state.total / 100:
            parts.append(f"padding {amount(state.padding)}")
        parts += [f"activations ~{amount(fullest.activations)}", f"buffers ~{amount(fullest.buffers)}"]
        line = f"memory per {place}{where}: {', '.join(parts)}; at most ~{amount(fullest.peak)} at once"
        return line if fullest.host is None else f"{line}\n{describe_host(fullest.host)}"


def describe_host(host: HostState) -> str:
    """What a process keeps off its device."""
    kinds = {"parameters": host.parameters, "gradients": host.gradients, "masters and moments": host.state}
    parts = [f"{kind} {amount(size)}" for kind, size in kinds.items() if size]
    filed = {"parameters": host.parameter_files, "masters and moments": host.files}
    files = f"; in files: {', '.join(f'{kind} {amount(size)}' for kind, size in filed.items() if size)}"
    files = files if host.on_disk else ""
    return f"in host memory per process: {', '.join([*parts, f'buffers {amount(host.buffers)}'])}{files}"


def amount(count: float) -> str:
    """Bytes for people, in decimal units to two or three digits: 2.6 GB."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while count >= 999.5 and len(units) > 1:
        count /= 1000
        del units[0]
    return f"{count:.0f} {units[0]}" if count >= 99.5 or units[0] == "B" else f"{count:.1f} {units[0]}"


def plan(config: Config, world_size: int, *, gpu: bool = True) -> MemoryPlan:
    """The memory of a training step of ``config`` on ``world_size`` ranks, of GPUs or of CPUs.

    The architecture must be known (``model.init_from`` read). Raises ConfigError where the layout does not fit.
    """
    layout, model = config.layout(world_size), config.model.architecture
    stages = tuple(rank_memory(config, model, layout, layout.rank(pp, 0, 0), gpu=gpu) for pp in range(layout.pp))
    return MemoryPlan(layout, stages, gpu)


def rank_memory(config: Config, model: ModelConfig, layout: Layout, rank: int, *, gpu: bool = True) -> RankMemory:
    """The memory of one rank of ``layout``."""
    coordinates, zero = layout.coordinates(rank), config.zero
    kernel = kernels(config, gpu)
    buffers = stage_buffers(config, model, layout, rank)
    precision, grads, offload = kernel.precision, config.train.grad_dtype, Offload.of(zero)
    accumulates = config.micro_batches(layout.dp) > 1
    state = model_state(buffers.all, coordinates["dp"], zero.stage, precision, grads, offload, accumulates)
    shares = block_shares(buffers.all, zero.stage, precision, grads, offload)
    host = host_state(shares, offload, gpu) if offload.active else None
    step = StepMemory(config, model, layout, coordinates["pp"], kernel, buffers)
    moments = list(step.moments())
    return RankMemory(
        rank,
        state,
        step.most_activations,
        max(moment.buffers for moment in moments),
        state.total - step.gradients + max(map(sum, moments)),
        tuple(step.activations),
        host,
    )


class _Moment(NamedTuple):
    """Bytes of gradient storages, of activations, and of all that comes and goes."""

    gradients: int
    activations: int
    buffers: int


class StepMemory:
    """One pipeline rank's step. ``activations``: bytes of one micro-batch in each of its chunks; ``most_activations``:
    of all that it holds at once; ``deferred``: what is left of one after the first of two parts of its backward;
    ``gradients``: bytes of the storages when all are there."""

    def __init__(
        self, config: Config, model: ModelConfig, layout: Layout, rank: int, kernel: Kernels, buffers: StageBuffers
    ) -> None:
        self.config, self.model, self.kernel, self.buffers = config, model, kernel, buffers
        self.dp, self.last = layout.dp, rank == layout.pp - 1
        self.size = sizes(config, model)
        chunks = rank_layers(config, model, rank)
        self.chunks = range(len(chunks))
        self.activations = [
            stage_activation_bytes(
                config, model, kernel, len(layers), rank == 0 and i == 0, self.last and i == self.chunks[-1]
            )
            for i, layers in enumerate(chunks)
        ]
        splits = config.schedule == "zero_bubble"
        self.deferred = len(chunks[0]) * deferred_bytes(self.size, kernel) if splits else 0
        self.offload = Offload.of(config.zero)
        self._leaving = {id(buffers.all[i]) for i in leaving_buffers(buffers.all, self.offload)}
        self._accumulates = config.micro_batches(layout.dp) > 1
        self.gradients = self._gradients(buffers.all)
        forwards = list(self._forwards(layout.pp, rank, config.micro_batches(layout.dp)))
        self.most_activations = max(kept for kept, _ in forwards)
        # Of activations and of the gradients that are there beside them, when both together are most.
        self.kept, self.before = max(forwards, key=sum)

    def _forwards(self, ranks: int, rank: int, micro_batches: int) -> Iterator[tuple[int, int]]:
        """(activations, gradients) held in each forward of the step: those before it are done, and as many backwards as
        make room for it. The schedule may do some sooner, so that a rank of unlike chunks holds a little less."""
        count, schedule = len(self.chunks), self.config.schedule
        bound = activation_bound(schedule, ranks, micro_batches, rank, count)
        if schedule == "zero_bubble":
            ahead = activation_bound("1f1b", ranks, micro_batches, rank)
            for done in range(micro_batches):
                whole = min(done + 1, ahead)
                kept = whole * self.activations[0] + (min(done + 1, bound) - whole) * self.deferred
                yield kept, self.gradients if done >= ahead else 0
            return
        backwards = backward_order(ranks, micro_batches, count)
        kept = gradients = 0
        reached: set[int] = set()
        for done, (_, chunk) in enumerate(forward_order(ranks, micro_batches, count)):
            kept += self.activations[chunk]
            if done >= bound:
                _, freed = backwards[done - bound]
                kept -= self.activations[freed]
                gradients += 0 if freed in reached else self._gradients(self.buffers.of_chunk(freed))
                reached.add(freed)
            yield kept, gradients

    def _gradients(self, buffers: Sequence[Buffer]) -> int:
        cut = self.config.zero.stage >= 2
        if cut or not self._accumulates:  # what leaves goes one by one
            buffers = [buffer for buffer in buffers if id(buffer) not in self._leaving]
        elements = sum(layout.numel // (layout.shards if cut else 1) for layout, *_ in buffers)
        return elements * BYTES[self.config.train.grad_dtype]

    def moments(self) -> Iterator[_Moment]:
        """Those that can be the step's highest."""
        kept, size, kernel = self.kept, self.size, self.kernel
        first = self.activations[-1] - self.deferred  # what the first backward empties
        rounding, recompute = self._rounding(), self.config.train.recompute
        gathered = self._gathered() + rounding
        yield _Moment(self.before, kept, gathered + (loss_bytes(size, kernel) if self.last else 0))
        backward = gathered + self._unsharded() + layer_backward_bytes(self.model, size, kernel)
        backward += recomputed_bytes(self.model, size, kernel, recompute, self.config.data.reset_at_document)
        # The first backward: in its first layer, in its last one, and when that one's gradients move to their buffer.
        yield _Moment(self.before, kept, backward)
        largest = max(self.buffers.all, key=lambda buffer: buffer.layout.numel)
        yield _Moment(max(self.before, self.gradients - self._gradients([largest])), kept - first, backward)
        moving = gathered + self._unsharded() + largest.layout.numel * kernel.element
        yield _Moment(self.gradients, kept - first, moving)
        yield _Moment(self.gradients, 0, self._update() + rounding)

    def _gathered(self) -> int:
        """Parameters that come and go, and the second copies that backward gathers them from."""
        zero = self.config.zero
        if zero.stage < 3:
            return 0
        sizes = [sum(buffer.layout.numel for buffer in unit if not buffer.persistent) for unit in self.buffers.units]
        settings = zero_settings(self.config)
        uses = [[unit for unit in self.buffers.uses if self.buffers.chunks[unit] == chunk] for chunk in self.chunks]
        gathered = max(gathered_elements(sizes, used, settings) for used in uses)
        near = zero.zero_hpz_partition_size
        copies = sum(sizes) // near if 1 < near < self.dp else 0
        return (gathered + copies) * self.kernel.element

    def _rounding(self) -> int:
        """Room for a piece of the masters that come from host memory to be rounded."""
        sends = any(
            id(buffer) in self._leaving
            and self.offload.sends_masters(values_leave(buffer, self.config.zero.stage, self.offload))
            for buffer in self.buffers.all
        )
        return 4 * self.offload.buffer_size if sends and self.kernel.gpu and self.kernel.element < 4 else 0

    def _unsharded(self) -> int:
        """Whole gradients that are yet to be cut into slices; in a first backward their slices are not there yet."""
        stage, shards = self.config.zero.stage, self.buffers.all[0].layout.shards
        if stage < 2 and (self._accumulates or not self._leaving):
            return 0
        limit = self.config.zero.reduce_bucket_size
        whole = max(unsharded_gradient_elements(self.buffers.of_chunk(chunk), limit) for chunk in self.chunks)
        if self._leaving:
            # Three on their way out (zero.offload.link), two of what was there on its way back to be added to.
            whole += whole // 2 // shards * (5 if self._accumulates else 3)
        elif not self.before:
            whole -= whole // shards
        return whole * BYTES[self.config.train.grad_dtype]

    def _update(self) -> int:
        """Gradients of one bucket in float32, where they are not; on a GPU the update reads them as they are."""
        if self.kernel.gpu or self.config.train.grad_dtype == "fp32":
            return 0
        buffers = self.buffers.all
        share = buffers[0].layout.shards if self.config.zero.stage >= 1 else 1
        return max(bucket_elements(buffers, self.config.zero.allgather_bucket_size)) // share * 4

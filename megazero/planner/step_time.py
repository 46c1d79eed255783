"""The time of a training step: its schedule simulated, with the time of every action on a given chip.

Computation follows from shapes (planner.compute), collectives from their bytes (planner.traffic) and the links between
the ranks of a group. Reductions and gathers over dp hide behind backward and forward as zero.sharded issues them; what
does not fit there, and the last bucket, is exposed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from megazero.config import Config
from megazero.layout import Axis, Layout
from megazero.models.config import ModelConfig
from megazero.pipeline.partition import given_partition, layer_costs, partition_layers
from megazero.pipeline.schedules import COMMUNICATION, Kind, Schedule, ScheduleName, build_schedule
from megazero.pipeline.simulate import simulate
from megazero.planner.activations import Kernels, Sizes, kernels, sizes
from megazero.planner.chips import Chip
from megazero.planner.compute import (
    Machine,
    Pass,
    embedding_seconds,
    gradient_seconds,
    head_seconds,
    total,
    update_seconds,
)
from megazero.planner.model_state import BYTES
from megazero.planner.offload import host_seconds
from megazero.planner.practice import MEGAZERO, Practice
from megazero.planner.traffic import (
    Collective,
    check_planned,
    enter_region,
    head_collectives,
    layer_collectives,
    leave_region,
)
from megazero.zero.offload.settings import Offload
from megazero.zero.offload.sizes import leaving_blocks


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, and of what they consist on the pipeline rank that ends last. ``tensor_parallel`` and
    ``data_parallel``: collectives that nothing hides; ``pipeline``: waiting for other stages; ``offload``: for what is
    kept off the device."""

    seconds: float
    compute: float
    tensor_parallel: float
    pipeline: float
    data_parallel: float
    optimizer: float
    offload: float = 0.0


class Network:
    """What a collective over an axis of ``layout`` takes on machines of one chip."""

    def __init__(self, chip: Chip, layout: Layout) -> None:
        self.chip, self.layout = chip, layout

    def _members(self, axis: Axis) -> tuple[int, int]:
        """(ranks of a group, of which in one machine)."""
        stride = {"tp": 1, "dp": self.layout.tp, "pp": self.layout.tp * self.layout.dp}[axis]
        ranks = self.layout.size(axis)
        return ranks, max(1, min(ranks, self.chip.gpus_per_node // stride))

    def seconds(self, axis: Axis, collective: Collective) -> float:
        """Every rank sends what others lack, in rings whose slowest link decides. Groups that have one rank in each
        machine have one network link each; those with more have as many."""
        ranks, near = self._members(axis)
        if ranks == 1:
            return 0.0
        machines, chip = -(-ranks // near), self.chip
        rate, latency = chip.node_rate, (near - 1) * chip.node.latency
        if machines > 1:
            rate = min(rate, near * chip.network_rate) if near > 1 else chip.network_rate
            latency += (machines - 1) * chip.network.latency
        moved = collective.elements * collective.itemsize * (ranks - 1) / ranks
        rounds = 2 if collective.kind == "all_reduce" else 1
        return chip.efficiency.collective + rounds * (moved / rate + latency)

    def transfer(self, moved: int) -> float:
        """Bytes from a pipeline stage to the next."""
        ranks, near = self._members("pp")
        if near == ranks:
            return moved / self.chip.node_rate + self.chip.node.latency
        return moved / self.chip.network_rate + self.chip.network.latency


def unit_elements(model: ModelConfig, size: Sizes, layers: int, first: bool, last: bool, tied_here: bool) -> list[int]:
    """Parameters on a rank of each unit of a chunk (zero.blocks), in the order of use, alignment apart."""
    hidden, norm = size.hidden, (2 if model.norm == "layernorm" else 1) * size.hidden
    layer = hidden * (size.qkv + size.query + size.inner + size.ffn) + 2 * norm
    layer += size.qkv * model.qkv_bias + hidden * model.out_bias + (size.inner + hidden) * model.mlp_bias
    units = [layer] * layers
    if first:
        positions = model.max_position_embeddings * hidden if model.position == "learned" else 0
        units = [size.vocab * hidden + positions, *units]
    if last:
        units.append(norm + (0 if tied_here else size.vocab * hidden))
    return units


@dataclass(frozen=True)
class _Chunk:
    """One stage of the model on one rank. ``compute``: without collectives; ``exposed``: collectives along tp."""

    units: tuple[int, ...]
    compute: Pass
    exposed: Pass

    @property
    def whole(self) -> Pass:
        return self.compute + self.exposed


class _Stage:
    """What one pipeline rank does in a step besides its schedule: collectives over dp, and the update."""

    def __init__(self, step: StepModel, chunks: Sequence[_Chunk]) -> None:
        self.step, self.chunks = step, chunks
        self.units = [unit for chunk in chunks for unit in chunk.units]
        self.compute = total(chunk.compute for chunk in chunks)
        self.exposed = total(chunk.exposed for chunk in chunks)
        self.whole = self.compute + self.exposed
        share = step.layout.dp if step.config.zero.stage >= 1 else 1
        offload, elements = Offload.of(step.config.zero), sum(self.units)
        leaving = sum(self.units[i] for i in leaving_blocks(self.units, offload))
        self.update = update_seconds(step.machine, (elements - leaving) // share, step.grad_bytes)
        fetched = elements // share if offload.parameters != "none" else 0
        self.host = host_seconds(step.config, leaving // share, fetched, "bf16", step.machine.chip.host)
        self.on_link = self._on_link()
        self.added = self._per_micro_batch() + self.on_link
        self.start, self.tail = self._at_start(), self._at_end()

    def _reduce(self, units: Sequence[int]) -> float:
        kind = "all_reduce" if self.step.config.zero.stage == 0 else "reduce_scatter"
        network, itemsize = self.step.network, self.step.grad_bytes
        return sum(network.seconds("dp", Collective(kind, unit, itemsize)) for unit in units)

    def _gather(self, units: Sequence[int]) -> float:
        network, itemsize = self.step.network, self.step.kernel.element
        return sum(network.seconds("dp", Collective("all_gather", unit, itemsize)) for unit in units)

    def _per_micro_batch(self) -> Pass:
        """What collectives over dp add to every forward and backward of all chunks together."""
        stage, slows = self.step.config.zero.stage, self.step.machine.chip.efficiency.interference
        if stage < 2 or self.step.layout.dp == 1:
            return Pass(0.0, 0.0)
        reduce = self._reduce(self.units) if self.step.micro_batches > 1 or stage == 3 else 0.0
        if stage == 2:
            # Reductions go on beside the forward that follows.
            beyond = max(0.0, reduce - self.whole.forward - self.whole.backward)
            return Pass(0.0, beyond + slows * (reduce - beyond))
        gather = self._gather(self.units)
        firsts = self._gather([chunk.units[0] for chunk in self.chunks])
        lasts = self._gather([chunk.units[-1] for chunk in self.chunks])
        forward = min(gather, firsts + max(0.0, gather - firsts - self.whole.forward))
        forward += slows * (gather - forward)
        if self.step.config.parallel.keep_gathered:
            forward /= self.step.micro_batches  # only the first gathers
        if not self.step.config.zero.reshard_after_forward or self.step.config.parallel.keep_gathered:
            gather = lasts = 0.0
        backward = min(gather + reduce, lasts + max(0.0, gather - lasts + reduce - self.whole.backward))
        return Pass(forward, backward + slows * (gather + reduce - backward))

    def _on_link(self) -> Pass:
        """What every forward and backward waits for the link to host memory: parameters come in both, unless they stay,
        and where gradients are cut, those of every micro-batch leave, and those before it come back to be added to."""
        host, micro_batches, config = self.host, self.step.micro_batches, self.step.config
        forward, backward = max(0.0, host.parameters - self.whole.forward), host.parameters
        if config.parallel.keep_gathered:
            forward /= micro_batches  # only the first fetches
        if config.parallel.keep_gathered or not config.zero.reshard_after_forward:
            backward = 0.0
        if config.zero.stage >= 2 and micro_batches > 1:
            backward += host.gradients
        return Pass(forward, max(0.0, backward - self.whole.backward))

    @property
    def exposed_update(self) -> float:
        """What of the host's update the forward that follows does not hide; before it, the last bucket's way out."""
        if not self.host.exposable:
            return 0.0
        last, units = self.units[0] / sum(self.units), len(self.units)
        hidden = self.whole.forward * (1 - 1 / units)
        return last * self.host.gradients + max(self.host.exposable / units, self.host.exposable - hidden)

    def _at_end(self) -> float:
        """What is exposed of the step's last reduction: its last bucket, and what backward has no time for."""
        if self.step.layout.dp == 1:
            return 0.0
        tail, stage = self._reduce(self.units[:1]), self.step.config.zero.stage
        if stage == 3 or (stage == 2 and self.step.micro_batches > 1):
            return tail  # the rest is in what every micro-batch adds
        whole, window = self._reduce(self.units), self.whole.backward
        exposed = max(tail, whole - window * (1 - 1 / len(self.units)))
        return exposed + self.step.machine.chip.efficiency.interference * (whole - exposed)

    def _at_start(self) -> float:
        """What is exposed of the gather of updated parameters, which starts in the update and goes on in forward."""
        if self.step.layout.dp == 1 or self.step.config.zero.stage not in (1, 2):
            return 0.0
        gather, first = self._gather(self.units), self._gather(self.units[:1])
        exposed = max(max(0.0, first - self.update), gather - self.update - self.whole.forward)
        return exposed + self.step.machine.chip.efficiency.interference * (gather - exposed)


class StepModel:
    """A step's settings, and what of them everything depends on. ``machine`` may serve many steps of one model."""

    def __init__(self, config: Config, layout: Layout, machine: Machine) -> None:
        check_planned(config)
        self.config, self.layout, self.machine = config, layout, machine
        self.practice = machine.practice
        self.model = config.model.architecture
        self.kernel: Kernels = kernels(config, gpu=True)
        self.size = sizes(config, self.model)
        self.network = Network(machine.chip, layout)
        self.micro_batches = config.micro_batches(layout.dp)
        self.grad_bytes = BYTES[config.train.grad_dtype]
        self.chunks = config.parallel.virtual_pp
        counts = stage_counts(config, self.model)
        alike: dict[tuple, _Stage] = {}
        self.stages: list[_Stage] = []
        for rank in range(layout.pp):
            own = tuple((counts[i], i == 0, i == len(counts) - 1) for i in range(rank, len(counts), layout.pp))
            if own not in alike:
                alike[own] = _Stage(self, [self._chunk(*chunk) for chunk in own])
            self.stages.append(alike[own])

    def _chunk(self, layers: int, first: bool, last: bool) -> _Chunk:
        model, size, machine = self.model, self.size, self.machine
        compute = machine.layer(model, size, self.config.train.recompute).times(layers)
        if first:
            compute = compute + embedding_seconds(machine, size)
        if last:
            compute = compute + head_seconds(machine, size)
        units = unit_elements(model, size, layers, first, last, model.tie_word_embeddings and first)
        recompute, adds = self.config.train.recompute, self.micro_batches > 1
        moved = gradient_seconds(machine, sum(units), self.grad_bytes, adds, recompute)
        forward, backward = self._along_tp(layers, first, last)
        hidden = 1 - self.practice.hides_tensor_parallel
        exposed = Pass(hidden * forward, hidden * backward)
        # A device that the host does not keep busy waits, as if it computed.
        issued, compute = layers * self._issue_seconds(), compute + (0.0, moved)
        compute = Pass(
            max(compute.forward, issued / 3 - exposed.forward), max(compute.backward, 2 * issued / 3 - exposed.backward)
        )
        return _Chunk(tuple(units), compute, exposed)

    def _issue_seconds(self) -> float:
        """What the host takes for a layer's forward and backward of a micro-batch."""
        practice, full = self.practice, self.config.train.recompute == "full"
        collectives = (3 if full else 2) * len(layer_collectives(self.size, self.kernel))
        parts = 1 + practice.issued_collective * collectives + practice.issued_again * full
        parts += practice.issued_gathers * (self.config.zero.stage == 3)
        return self.machine.chip.efficiency.issue * practice.issued_layer * parts

    def _along_tp(self, layers: int, first: bool, last: bool) -> tuple[float, float]:
        """Seconds of the collectives of planner.traffic's micro_batch_collectives, with the program's partial sums."""
        size, kernel, partial = self.size, self.kernel, self.practice.partial_sum_bytes
        layer = layers * self._tp_seconds(layer_collectives(size, kernel, partial))
        forward, backward = layer, layer
        if first:
            forward += self._tp_seconds(leave_region(size, kernel.element))
            backward += self._tp_seconds(enter_region(size, kernel))
        if last:
            forward += self._tp_seconds(head_collectives(size, kernel, partial))
        if self.config.train.recompute == "full":
            backward += layer
        return forward, backward

    def _tp_seconds(self, collectives: Iterable[Collective]) -> float:
        return sum(self.network.seconds("tp", collective) for collective in collectives)

    def cost(self, rank: int, kind: Kind, chunk: int) -> float:
        """Seconds of an action, as the simulation asks for them."""
        if kind in (Kind.GATHER, Kind.REDUCE):
            return 0.0
        if kind in COMMUNICATION:
            return self.network.transfer(self.size.residual * self.kernel.element)
        stage = self.stages[rank]
        backward = kind is Kind.BACKWARD
        return stage.chunks[chunk].whole[backward] + stage.added[backward] / self.chunks

    def busy(self, rank: int) -> float:
        """Seconds of all forwards and backwards of a rank."""
        stage = self.stages[rank]
        return self.micro_batches * (sum(stage.whole) + sum(stage.added))

    def ends(self) -> list[float]:
        """When each rank's last action ends. A long schedule is periodic: its middle is not simulated."""
        pp, count = self.layout.pp, self.micro_batches
        if pp == 1:
            return [self.busy(0)]
        period = -(-_PERIOD // pp) * pp
        short = period + count % pp
        if count <= short + period:
            return self._simulated(count)
        ends, longer = self._simulated(short), self._simulated(short + period)
        ends = [a + (b - a) * (count - short) / period for a, b in zip(ends, longer, strict=True)]
        return [max(end, self.busy(rank)) for rank, end in enumerate(ends)]

    def _simulated(self, micro_batches: int) -> list[float]:
        cost = cache(self.cost)
        schedule = _schedule(self.config.schedule, self.layout.pp, micro_batches, self.chunks)
        timeline = simulate(schedule, lambda rank, action: cost(rank, action.kind, action.chunk))
        return [spans[-1].end for spans in timeline.ranks]

    def time(self) -> StepTime:
        """By simulation."""
        ends, stages = self.ends(), self.stages
        last = max(range(len(ends)), key=lambda rank: ends[rank] + stages[rank].tail)
        update, start = max(stage.update for stage in stages), max(stage.start for stage in stages)
        offload = max(stage.exposed_update for stage in stages)
        stage, count = stages[last], self.micro_batches
        return StepTime(
            seconds=start + ends[last] + stage.tail + update + offload,
            compute=count * sum(stage.compute),
            tensor_parallel=count * sum(stage.exposed),
            pipeline=ends[last] - self.busy(last),
            data_parallel=start + stage.tail + count * (sum(stage.added) - sum(stage.on_link)),
            optimizer=update,
            offload=offload + count * sum(stage.on_link),
        )

    def at_least(self) -> float:
        """What no simulation comes below: the busiest rank's work, after the forwards that bring its first input and
        before the backwards that end with its last gradient."""
        hop = self.network.transfer(self.size.residual * self.kernel.element)
        fill = longest = 0.0
        for rank, stage in enumerate(self.stages):
            longest = max(longest, self.busy(rank) + fill + (self.stages[0].tail if rank == 0 else 0.0))
            fill += sum(stage.chunks[0].whole) + 2 * hop
        return max(s.start for s in self.stages) + longest + max(s.update + s.exposed_update for s in self.stages)


_PERIOD = 8  # micro-batches, but a multiple of the number of ranks, after which a schedule repeats itself


@cache
def _schedule(name: ScheduleName, stages: int, micro_batches: int, chunks: int) -> Schedule:
    return build_schedule(name, stages, micro_batches, chunks)


@cache
def balanced_counts(model: ModelConfig, seq_length: int, stages: int) -> tuple[int, ...]:
    """Layers of each of ``stages``, balanced by cost as the engine does it."""
    costs = layer_costs(model, seq_length)
    return tuple(map(len, partition_layers(costs.layers, costs.first, costs.last, stages)))


def stage_counts(config: Config, model: ModelConfig) -> tuple[int, ...]:
    """Layers of each of the model's stages, as build.stage_layers gives them."""
    if config.parallel.partition is not None:
        return tuple(map(len, given_partition(config.parallel.partition, model.num_layers)))
    return balanced_counts(model, config.data.seq_length, config.parallel.pp * config.parallel.virtual_pp)


def step_time(config: Config, world_size: int, chip: Chip, practice: Practice = MEGAZERO) -> StepTime:
    """Of ``config`` on ``world_size`` GPUs of one kind.

    Raises ConfigError where the layout does not fit.
    """
    return StepModel(config, config.layout(world_size), Machine(chip, practice)).time()

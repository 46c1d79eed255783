"""What each rank sends and receives in a step, element by element: every collective by kind, group and dtype.

A collective's elements are those of the whole buffer it works on; over a group of N, an all-gather or a
reduce-scatter moves (N - 1)/N of them per rank, an all-reduce twice that. The step is one of many: what a first step
does besides (broadcasts, the agreement on an order) is not in it. With tensor parallelism nothing is in it that only
the first micro-batch does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from megazero.config import Config
from megazero.errors import ConfigError
from megazero.layout import Layout
from megazero.models.config import ModelConfig
from megazero.pipeline.schedules import COMMUNICATION, SENDS, Action
from megazero.planner.activations import Kernels, Sizes, kernels, sizes
from megazero.planner.model_state import BYTES, Buffer, StageBuffers


class Collective(NamedTuple):
    """``kind``: all_gather, reduce_scatter, all_reduce, send or recv. ``itemsize``: bytes of an element."""

    kind: str
    elements: int
    itemsize: int


class Route(NamedTuple):
    """What traffic is counted by. ``group``: tp, dp, pp, world; or, of some coordinates along an axis, tp[0,1]. Bytes
    between the device and the host, and between that and files, are those of a group host or files."""

    group: str
    kind: str
    itemsize: int


Traffic = Counter[Route]
"""Route → elements of a step."""


def check_planned(config: Config) -> None:
    """Raises ConfigError for settings whose traffic or time is not modelled."""
    zero, why = config.zero, "is not in the planner's model of traffic and time; plan without it"
    found = [(f"zero.{name}", why) for name in ("mics_shard_size", "zero_hpz_partition_size") if getattr(zero, name)]
    if config.train.precision == "fp32":
        found.append(
            ("train.precision", "fp32: the rate of a GPU's products in it is not known; plan with bf16 or fp16")
        )
    if config.schedule == "zero_bubble":
        found.append(
            ("parallel.schedule", "zero_bubble's split backward is not in the planner's model; plan with 1f1b")
        )
    if found:
        raise ConfigError(found)


def group_name(axis: str, members: Sequence[int], size: int) -> str:
    """The group of the coordinates ``members`` along an axis of ``size`` ranks."""
    return axis if len(members) == size else f"{axis}[{','.join(map(str, members))}]"


def enter_region(size: Sizes, kernel: Kernels) -> list[Collective]:
    """What gives every rank all tokens: nothing where it has them."""
    if size.tp == 1 or size.outside == size.tokens:
        return []
    return [Collective("all_gather", size.tokens * size.hidden, kernel.element)]


def leave_region(size: Sizes, itemsize: int) -> list[Collective]:
    """The sum of the ranks' partial results, for the tokens that each has outside."""
    if size.tp == 1:
        return []
    kind = "all_reduce" if size.outside == size.tokens else "reduce_scatter"
    return [Collective(kind, size.tokens * size.hidden, itemsize)]


def layer_collectives(size: Sizes, kernel: Kernels, partial: int = 4) -> list[Collective]:
    """Those of one layer's forward, and as many again of its backward. ``partial``: bytes of a partial sum's element
    ([Note: partial products are added in float32] in tensor_parallel.linear)."""
    return 2 * (enter_region(size, kernel) + leave_region(size, partial))


def head_collectives(size: Sizes, kernel: Kernels, partial: int = 4) -> list[Collective]:
    """Those of the loss, whose gradients are made in forward: two reductions of the softmax, one of hidden states."""
    if size.tp == 1:
        return []
    softmax = [Collective("all_reduce", size.tokens, 4), Collective("all_reduce", 2 * size.tokens, 4)]
    return enter_region(size, kernel) + softmax + leave_region(size, partial)


def micro_batch_collectives(
    config: Config, size: Sizes, kernel: Kernels, layers: int, first: bool, last: bool
) -> tuple[list[Collective], list[Collective]]:
    """(forward's, backward's) along tp, of one micro-batch in a chunk of ``layers`` layers."""
    layer = layer_collectives(size, kernel)
    forward, backward = layers * layer, layers * layer
    if first:
        forward = forward + leave_region(size, kernel.element)
        backward = backward + enter_region(size, kernel)
    if last:
        forward = forward + head_collectives(size, kernel)
    if config.train.recompute == "full":
        backward = backward + layers * layer
    return forward, backward


def reduced(config: Config, buffers: StageBuffers) -> Collective:
    """The reduction of a whole stage's gradients over dp."""
    kind = "all_reduce" if config.zero.stage == 0 else "reduce_scatter"
    return Collective(kind, _elements(buffers.all), BYTES[config.train.grad_dtype])


def gathered(buffers: Iterable[Buffer], kernel: Kernels) -> Collective:
    """The gather of parameters over dp."""
    return Collective("all_gather", _elements(buffers), kernel.element)


def _elements(buffers: Iterable[Buffer]) -> int:
    return sum(buffer.layout.numel for buffer in buffers)


def step_traffic(
    config: Config,
    model: ModelConfig,
    layout: Layout,
    rank: int,
    buffers: StageBuffers,
    chunks: Sequence[tuple[int, bool, bool]],
    actions: Sequence[Action],
    *,
    gpu: bool = True,
) -> Traffic:
    """One rank's step. ``chunks``: of each model chunk on the rank, its layers and whether it is the model's first, its
    last; ``actions``: the rank's part of the schedule."""
    size, kernel = sizes(config, model), kernels(config, gpu)
    traffic: Traffic = Counter()

    def add(group: str, collectives: Iterable[Collective], times: int = 1) -> None:
        for kind, elements, itemsize in collectives:
            traffic[Route(group, kind, itemsize)] += times * elements

    micro_batches = config.micro_batches(layout.dp)
    for layers, first, last in chunks:
        for part in micro_batch_collectives(config, size, kernel, layers, first, last):
            add("tp", part, micro_batches)
    for action in actions:
        if action.kind in COMMUNICATION:
            kind = "send" if action.kind in SENDS else "recv"
            add("pp", [Collective(kind, size.residual, kernel.element)])
    if layout.dp > 1:
        _add_data_parallel(add, config, buffers, kernel, micro_batches)
    _add_partial_sums(add, config, layout, rank, buffers)
    if layout.world_size > 1:
        add("world", [Collective("all_reduce", 4, 8)])
    return Counter({route: elements for route, elements in traffic.items() if elements})


Add = Callable[..., None]
"""(group, collectives, times)"""


def _add_data_parallel(add: Add, config: Config, buffers: StageBuffers, kernel: Kernels, micro_batches: int) -> None:
    zero = config.zero
    add("dp", [reduced(config, buffers)], micro_batches if zero.stage >= 2 else 1)
    if zero.stage == 0:
        return
    cut = [buffer for buffer in buffers.all if zero.stage == 3 and not buffer.persistent]
    add("dp", [gathered((b for b in buffers.all if zero.stage < 3 or b.persistent), kernel)])
    add("dp", [gathered(cut, kernel)], gathers(config, micro_batches))


def gathers(config: Config, micro_batches: int) -> int:
    """How often a step makes parameters whole that stage 3 cuts."""
    return 1 if config.parallel.keep_gathered else micro_batches * (2 if config.zero.reshard_after_forward else 1)


def _add_partial_sums(add: Add, config: Config, layout: Layout, rank: int, buffers: StageBuffers) -> None:
    """Sums of gradients that replicas have a part of each ([Note: partial gradients] in zero.partial)."""
    dp_rank = layout.coordinates(rank)["dp"]
    for block, *_ in buffers.all:
        owned = block.shard(dp_rank) if config.zero.stage >= 1 else (0, block.numel)
        for first, last, piece, _ in block.pieces(*owned):
            for replication in piece.replication:
                if replication.gradient == "partial":
                    name = group_name(replication.axis, replication.members, layout.size(replication.axis))
                    add(name, [Collective("all_reduce", last - first, BYTES[config.train.grad_dtype])])

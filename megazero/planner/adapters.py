"""Low-rank adapters on a frozen model (Hu et al. 2021, arXiv 2106.09685), as peft and `megazero.initialize` train them.

Trained are two matrices beside each projection of queries and of values. The rest has 16-bit values and nothing else:
no gradients, no masters, no moments; its products have no weight gradients, and keep no inputs for them. The model is
transformers', which runs without torch.compile and makes all logits at once; every process has whole layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from megazero.build import zero_settings
from megazero.config import Config
from megazero.errors import ConfigError
from megazero.layout import Layout
from megazero.models.config import ModelConfig
from megazero.models.parameters import flops_per_token, layer_shapes, matmul_parameter_count, parameter_shapes
from megazero.planner.activations import Sizes, sizes
from megazero.planner.buffers import gathered_elements, unsharded_gradient_elements
from megazero.planner.chips import Chip
from megazero.planner.compute import Machine, Pass, attention_seconds, total, update_seconds
from megazero.planner.memory import RankMemory
from megazero.planner.model_state import Buffer, ModelState, StageBuffers, model_state
from megazero.planner.practice import TRANSFORMERS
from megazero.planner.search import LARGEST_MICRO_BATCH, Choice, Plan, Search, too_large, with_stage
from megazero.planner.step_time import Network, StepTime
from megazero.planner.traffic import Collective, Route, Traffic, check_planned
from megazero.sharding import ShardSpec, whole
from megazero.zero.blocks import Unit
from megazero.zero.flat import FlatLayout
from megazero.zero.offload.settings import Offload

TARGETS = ("q", "v")
LOGIT_BYTES = 14
"""Of one logit when its gradient is made: itself in 16 bits, and in float32 its log-softmax, the gradient of that and
its own."""


def check_adapters(config: Config, model: ModelConfig, rank: int) -> None:
    """Raises ConfigError for what this has no plan of."""
    found = []
    if model.position != "rotary" or model.norm != "rmsnorm":
        found.append(("--lora", "adapters of q_proj and v_proj need a model of the Llama, Mistral or Qwen kind"))
    if not 1 <= rank <= model.hidden_size:
        found.append(("--lora", f"{rank} must be from 1 to model.hidden_size = {model.hidden_size}"))
    if Offload.of(config.zero).active or config.train.offload_activations:
        found.append(("--lora", "with offload there is no plan of adapters; leave it out"))
    if config.train.grad_dtype != "fp32":
        found.append(("train.grad_dtype", "gradients of adapters are added up in fp32; leave it out"))
    if found:
        raise ConfigError(found)
    check_planned(config)


def adapter_shapes(model: ModelConfig, rank: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """Name in a layer → shape of the two matrices beside each target."""
    shapes = layer_shapes(model)
    for target in TARGETS:
        rows, columns = shapes[f"attention.{target}.weight"]
        yield f"attention.{target}.lora_a", (rank, columns)
        yield f"attention.{target}.lora_b", (rows, rank)


def adapter_units(model: ModelConfig, rank: int) -> list[Unit]:
    """As foreign.units divides a causal language model of transformers: embedding, layers, norm, head."""
    shapes = parameter_shapes(model)
    for layer in range(model.num_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in adapter_shapes(model, rank)}
    heads = ["embedding.", *(f"layers.{layer}." for layer in range(model.num_layers)), "final_norm.", "head."]
    units = []
    for head in heads:
        under = {name: shape for name, shape in shapes.items() if name.startswith(head)}
        specs: dict[str, ShardSpec] = {name: whole(name, shape) for name, shape in under.items()}
        if specs:
            units.append(Unit(head.rstrip("."), specs, ()))
    return units


def adapter_buffers(config: Config, model: ModelConfig, rank: int, dp: int) -> StageBuffers:
    """The flat buffers of every process."""
    threshold = config.zero.stage3_param_persistence_threshold if config.zero.stage == 3 else None
    units = []
    for unit in adapter_units(model, rank):
        frozen = {name for name in unit.specs if ".lora_" not in name}
        plans = unit.split(frozen, dict.fromkeys(unit.specs, "bf16"), threshold)
        units.append(
            tuple(
                Buffer(FlatLayout.build(p.name, p.specs, dp, lambda name, spec: ""), p.persistent, p.trainable)
                for p in plans
            )
        )
    uses = [*range(len(units)), *([0] if model.tie_word_embeddings else ())]
    return StageBuffers(tuple(units), tuple(uses), (0,) * len(units))


def layer_bytes(size: Sizes, rank: int) -> int:
    """What a layer keeps of its forward: inputs of both norms in float32, of the adapters, of attention with keys and
    values repeated for all query heads and a mask of numbers to add, and of the gated activation and its product."""
    norms = 2 * 4 * size.tokens * (size.hidden + 1)
    adapters = 2 * size.tokens * (size.hidden + len(TARGETS) * rank)
    attention = size.tokens * (4 * 2 * size.query + 4 * size.heads) + 2 * size.sequences * size.seq_length**2
    return norms + adapters + attention + 3 * 2 * size.tokens * size.ffn


class _Moments(NamedTuple):
    """Bytes of activations and of what comes and goes, at the moments that can be the highest."""

    activations: int
    buffers: int


def _moments(config: Config, model: ModelConfig, buffers: StageBuffers, rank: int, dp: int) -> Iterator[_Moments]:
    size, zero = sizes(config, model), config.zero
    stream, layer = 2 * size.residual, layer_bytes(size, rank)
    full = config.train.recompute == "full"
    kept = model.num_layers * (stream if full else layer)
    # Token ids and labels, the rotation of every position, the mask of padding.
    kept += 3 * 8 * size.tokens + 4 * size.seq_length * model.head_size + size.sequences * size.seq_length**2
    norm = 4 * size.tokens * size.hidden
    gathered = unsharded = 0
    if zero.stage == 3:
        cut = [sum(buffer.layout.numel for buffer in unit if not buffer.persistent) for unit in buffers.units]
        gathered = 2 * gathered_elements(cut, buffers.uses, zero_settings(config))
    trained = [buffer for buffer in buffers.all if buffer.trainable]
    if zero.stage >= 2 and dp > 1:
        unsharded = 4 * unsharded_gradient_elements(trained, zero.reduce_bucket_size)
    logits = size.tokens * model.vocab_size
    yield _Moments(kept + norm + stream, gathered + LOGIT_BYTES * logits)
    # Logits stay until the step is done, as what the model has returned.
    again = layer if full else 0
    gradients = 2 * (2 * size.residual + 3 * size.tokens * size.ffn)
    yield _Moments(kept, gathered + unsharded + 2 * logits + again + gradients)


def adapter_memory(config: Config, model: ModelConfig, rank: int, layout: Layout) -> RankMemory:
    """Of every process alike."""
    buffers = adapter_buffers(config, model, rank, layout.dp)
    state = adapter_state(config, buffers)
    moments = list(_moments(config, model, buffers, rank, layout.dp))
    most = max(sum(moment) for moment in moments)
    activations = max(moment.activations for moment in moments)
    return RankMemory(
        0, state, activations, max(moment.buffers for moment in moments), state.total + most, (activations,)
    )


def adapter_state(config: Config, buffers: StageBuffers, dp_rank: int = 0) -> ModelState:
    """torch's optimizer keeps no moments of what fills up the last slices."""
    state, unused = model_state(buffers.all, dp_rank, config.zero.stage, "bf16"), 0
    for layout in (buffer.layout for buffer in buffers.all if buffer.trainable):
        start, end = layout.shard(dp_rank) if config.zero.stage else (0, layout.numel)
        unused += end - start - sum(high - low for low, high in layout.group_ranges(start, end).values())
    return replace(state, padding=state.padding - 2 * 4 * unused)


def adapter_traffic(config: Config, buffers: StageBuffers, layout: Layout) -> Traffic:
    """One process's step."""
    stage, count = config.zero.stage, config.micro_batches(layout.dp)
    traffic: Traffic = Traffic()
    if layout.dp == 1:
        return traffic
    trained = sum(buffer.layout.numel for buffer in buffers.all if buffer.trainable)
    traffic[Route("dp", "all_reduce" if stage == 0 else "reduce_scatter", 4)] = trained * (count if stage >= 2 else 1)
    cut = [sum(b.layout.numel for b in unit if stage == 3 and not b.persistent) for unit in buffers.units]
    # No gradient comes to an embedding that is the embedding alone.
    gathered = 2 * sum(cut) - (cut[0] if buffers.uses[-1] else 0)
    updated = sum(
        buffer.layout.numel for buffer in buffers.all if buffer.trainable and (stage < 3 or buffer.persistent)
    )
    traffic[Route("dp", "all_gather", 2)] = (updated if stage else 0) + count * gathered
    traffic[Route("world", "all_reduce", 8)] = 2
    return Traffic({route: elements for route, elements in traffic.items() if elements})


def adapter_time(config: Config, model: ModelConfig, rank: int, layout: Layout, chip: Chip) -> StepTime:
    """Seconds of a step. Collectives of the adapters hide behind backward; stage 3's gathers as far as they can."""
    machine, size = Machine(chip, TRANSFORMERS), sizes(config, model)
    buffers, count = adapter_buffers(config, model, rank, layout.dp), config.micro_batches(layout.dp)
    layer = _layer_seconds(machine, model, size, rank)
    if config.train.recompute == "full":
        layer = layer + (0.0, layer.forward)
    logits = machine.moved(machine.practice.logit_bytes * size.tokens * model.vocab_size)
    head = machine.product(size.tokens, model.vocab_size, size.hidden)
    compute = layer.times(model.num_layers) + (head + logits / 2, head + logits / 2)
    issued = chip.efficiency.issue * machine.practice.issued_layer * model.num_layers
    compute = Pass(max(compute.forward, issued / 3), max(compute.backward, 2 * issued / 3))
    network, trained = Network(chip, layout), [buffer.layout.numel for buffer in buffers.all if buffer.trainable]
    gather = exposed = 0.0
    for buffer in buffers.all if config.zero.stage == 3 else ():
        gather += network.seconds("dp", Collective("all_gather", 0 if buffer.persistent else buffer.layout.numel, 2))
    if gather:
        slows = chip.efficiency.interference
        exposed = sum(max(0.0, gather - one) + slows * min(gather, one) for one in compute)
    reduce = network.seconds("dp", Collective("all_reduce", sum(trained), 4))
    share = layout.dp if config.zero.stage else 1
    update = update_seconds(machine, sum(trained) // share, 4)
    seconds = count * (sum(compute) + exposed) + reduce + update
    return StepTime(seconds, count * sum(compute), 0.0, 0.0, count * exposed + reduce, update)


def _layer_seconds(machine: Machine, model: ModelConfig, size: Sizes, rank: int) -> Pass:
    """Of a frozen matrix the product alone, and that of its input's gradient; of an adapter's all three."""
    shapes = {name: shape for name, shape in layer_shapes(model).items() if len(shape) == 2}
    products = [
        Pass(machine.product(size.tokens, *shape), machine.product(size.tokens, *shape[::-1]))
        for shape in shapes.values()
    ]
    products += [machine.linear(size.tokens, *shape) for _, shape in adapter_shapes(model, rank)]
    turned, residual = size.query + size.key_value, size.residual
    pointwise = machine.pointwise(8 * residual + size.tokens * (2 * turned + size.inner + size.ffn), 30)
    return total([*products, attention_seconds(machine, model, size), Pass(pointwise, 2 * pointwise)])


def adapter_flops(model: ModelConfig, seq_length: int, rank: int) -> int:
    """Model FLOPs of forward and backward per trained token: as flops_per_token, less the products of frozen weights'
    gradients."""
    adapters = model.num_layers * sum(a * b for _, (a, b) in adapter_shapes(model, rank))
    return flops_per_token(model, seq_length) - 2 * matmul_parameter_count(model) + 6 * adapters


def search_adapters(base: Config, gpus: int, chip: Chip, rank: int, top: int = 5) -> Search:
    """The ``top`` fastest ZeRO stages, micro-batches and kinds of recompute for adapters of ``rank``.

    Raises ConfigError where there is none to look for.
    """
    model = base.model.architecture
    check_adapters(base, model, rank)
    layout, usable = Layout(dp=gpus), chip.usable_memory()
    samples = base.train.global_batch_size // gpus
    if base.train.global_batch_size % gpus:
        told = f"{base.train.global_batch_size} is not a multiple of the {gpus} GPUs"
        raise ConfigError.single("train.global_batch_size", told)
    plans, rejected = [], []
    for micro_batch in (size for size in range(1, LARGEST_MICRO_BATCH + 1) if samples % size == 0):
        for recompute in ("none", "full"):
            for stage in (0, 1, 2, 3) if gpus > 1 else (0,):
                choice = Choice(1, 1, 1, gpus, stage, micro_batch, recompute)
                train = base.train.model_copy(update={"micro_batch_size": micro_batch, "recompute": recompute})
                config = with_stage(base.model_copy(update={"train": train}), stage)
                memory = adapter_memory(config, model, rank, layout)
                if memory.peak > usable:
                    rejected.append(too_large(choice, 0, memory.peak, usable))
                    continue
                time = adapter_time(config, model, rank, layout, chip)
                tokens = base.train.global_batch_size * base.data.seq_length / gpus / time.seconds
                mfu = tokens * adapter_flops(model, base.data.seq_length, rank) / chip.peak_flops
                plans.append(Plan(choice, config, memory, time, tokens, mfu))
    plans.sort(key=lambda plan: (plan.time.seconds, plan.memory.peak))
    return Search(plans[:top], len(plans), rejected)

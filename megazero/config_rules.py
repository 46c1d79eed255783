"""The rules between settings. Each is a generator of (field, what is wrong and what would fix it).

A message names every field it rests on, so that a report can leave out what only follows from another mistake.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from megazero.models import registry
from megazero.models.config import ModelConfig
from megazero.models.parts import attention_parts
from megazero.places import unreachable

if TYPE_CHECKING:
    from megazero.config import Config

Problems = Iterator[tuple[str, str]]


def problems(config: Config, world_size: int | None = None, needs_data: bool = False) -> Problems:
    """Every rule broken. Those of the architecture wait until it is known, those of the layout for a world size."""
    yield from _model_source(config)
    if config.model.known:
        yield from _model_shape(config)
        yield from _tensor_parallel(config)
        yield from _pipeline(config)
        yield from _sequence(config)
    yield from _zero(config)
    yield from _offload(config)
    yield from _cuda_graph(config)
    yield from _data(config)
    yield from _ramp_up(config)
    yield from _optimizer(config)
    yield from _checkpoint(config)
    if needs_data:
        yield from _data_files(config)
        yield from unreachable(config)
    if world_size is not None:
        yield from world_problems(config, world_size)


def world_problems(config: Config, world_size: int) -> Problems:
    """Rules that need the number of processes."""
    tp, pp, train = config.parallel.tp, config.parallel.pp, config.train
    cell = f"parallel.tp x parallel.pp = {tp} x {pp} = {tp * pp}"
    if world_size < tp * pp:
        yield (
            "parallel.tp",
            f"{cell} needs at least {tp * pp} processes and there {_are(world_size)}; "
            f"start {tp * pp}, or choose sizes whose product divides {world_size}",
        )
        return
    if world_size % (tp * pp):
        below = world_size // (tp * pp) * tp * pp
        yield (
            "parallel.tp",
            f"{cell} does not divide the {world_size} processes; start {below} or {below + tp * pp}, "
            f"or choose sizes whose product divides {world_size}",
        )
        return
    if train.cuda_graph and world_size > 1:
        yield (
            "train.cuda_graph",
            f"is for one process and there {_are(world_size)}, which meet within a step; leave it out",
        )
    dp = world_size // (tp * pp)
    unit = train.micro_batch_size * dp
    if train.global_batch_size % unit:
        yield (
            "train.global_batch_size",
            f"{train.global_batch_size} is not a multiple of train.micro_batch_size x dp = "
            f"{train.micro_batch_size} x {dp} = {unit}, where dp is {world_size} processes / ({cell}); "
            f"use {_multiples(train.global_batch_size, unit)}"
            + (", or a smaller train.micro_batch_size" if train.global_batch_size % dp == 0 else ""),
        )
    for value in dict.fromkeys(train.rampup_batch_size[:2] if train.rampup_batch_size else ()):
        if value % unit:
            yield (
                "train.rampup_batch_size",
                f"start and increment are to be multiples of train.micro_batch_size x dp = {train.micro_batch_size} x "
                f"{dp} = {unit}, where dp is {world_size} processes / ({cell}), and {value} is none; use "
                f"{_multiples(value, unit)}",
            )
    for name in ("mics_shard_size", "zero_hpz_partition_size"):
        size = getattr(config.zero, name)
        if size and dp % size:
            yield (
                f"zero.{name}",
                f"{size} does not divide dp = {dp}, which is {world_size} processes / ({cell}); "
                f"use {either(divisors(dp))}, or 0",
            )


def divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def either(choices: Sequence[object]) -> str:
    """1, 2 or 4"""
    words = [str(choice) for choice in choices]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _are(count: int) -> str:
    return f"is {count}" if count == 1 else f"are {count}"


def _multiples(number: int, unit: int) -> str:
    """The neighbouring multiples of ``unit``."""
    below = number // unit * unit
    return either([below, below + unit] if below else [unit])


def _model_source(config: Config) -> Problems:
    model = config.model
    if model.init_from is not None and model.preset is not None:
        yield (
            "model.preset",
            f"model.init_from = {model.init_from} gives the architecture already; leave out one of the two",
        )


def _model_shape(config: Config) -> Problems:
    model = config.model
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    for name in ("num_key_value_heads", "head_dim", "ffn_hidden_size", "sliding_window"):
        value = getattr(model, name)
        if value is not None and value < 1:
            yield f"model.{name}", f"{value} must be at least 1, or unset"
    if model.head_dim is None and model.hidden_size % heads:
        yield (
            "model.num_attention_heads",
            f"{heads} heads do not divide model.hidden_size = {model.hidden_size}; use "
            f"{_multiples(model.hidden_size, heads)} wide, or give model.head_dim",
        )
    elif model.position == "rotary" and model.head_size % 2:
        yield (
            "model.head_dim",
            f"{model.head_size} (model.hidden_size / model.num_attention_heads where unset) is odd, and "
            f"model.position = rotary turns pairs; use {model.head_size - 1 or 2} or {model.head_size + 1}",
        )
    if kv_heads is not None and kv_heads >= 1 and heads % kv_heads:
        yield (
            "model.num_key_value_heads",
            f"{kv_heads} does not divide model.num_attention_heads = {heads}; use {either(divisors(heads))}",
        )
    if model.attention_dropout is not None and not 0 <= model.attention_dropout < 1:
        yield "model.attention_dropout", f"{model.attention_dropout:g} must be at least 0 and below 1"
    yield from registry.problems(model)
    yield from _rope_scaling(model)


def _rope_scaling(model: ModelConfig) -> Problems:
    scaling = model.rope_scaling
    if scaling is None:
        return
    if model.position != "rotary":
        yield "model.rope_scaling", f"has no meaning with model.position = {model.position}; use rotary or leave it out"
    if not scaling.factor > 0:
        yield "model.rope_scaling.factor", f"{scaling.factor:g} must be above 0"
    if scaling.type == "llama3" and not scaling.high_freq_factor > scaling.low_freq_factor:
        yield (
            "model.rope_scaling.high_freq_factor",
            f"{scaling.high_freq_factor:g} must be above model.rope_scaling.low_freq_factor = "
            f"{scaling.low_freq_factor:g}",
        )


def _tensor_parallel(config: Config) -> Problems:
    model, tp = config.model, config.parallel.tp
    heads, kv_heads, ffn = model.num_attention_heads, model.kv_heads, model.ffn_size
    fitting = [d for d in divisors(heads) if _cuts(kv_heads, d) and ffn % d == 0]
    if heads % tp:
        yield (
            "parallel.tp",
            f"{tp} does not divide model.num_attention_heads = {heads}; use {either(fitting)}",
        )
    elif not _cuts(kv_heads, tp):
        yield (
            "parallel.tp",
            f"{tp} neither divides model.num_key_value_heads = {kv_heads} nor is a multiple of it "
            f"(model.num_attention_heads = {heads}); use {either(fitting)}",
        )
    elif ffn % tp:
        yield (
            "parallel.tp",
            f"{tp} does not divide model.ffn_hidden_size = {ffn} (4 x model.hidden_size where unset); use "
            f"{either(fitting)}, or {_multiples(ffn, tp)} wide",
        )
    elif uncut := [part for part in attention_parts(model) if not _cuts(part.units, tp)]:
        yield (
            "parallel.tp",
            f"{tp} neither divides the {uncut[0].units} units of {uncut[0].name!r} in model.attention = "
            f"{model.attention} nor is a multiple of them; use {either(fitting)}",
        )
    if config.parallel.sequence_parallel is True:
        length = config.data.seq_length
        if tp == 1:
            yield "parallel.sequence_parallel", "true needs parallel.tp above 1; use auto or false"
        elif length % tp:
            yield (
                "parallel.sequence_parallel",
                f"parallel.tp = {tp} does not divide data.seq_length = {length}; use {_multiples(length, tp)} tokens, "
                "or auto",
            )


def _cuts(units: int, tp: int) -> bool:
    """Whether each of ``tp`` ranks can hold whole units, or each unit be held by equally many ranks."""
    return units % tp == 0 or tp % units == 0


def _pipeline(config: Config) -> Problems:
    parallel, layers = config.parallel, config.model.num_layers
    pp, virtual_pp, partition = parallel.pp, parallel.virtual_pp, parallel.partition
    stages, product = pp * virtual_pp, f"parallel.pp = {pp}"
    if virtual_pp > 1:
        product = f"parallel.pp x parallel.virtual_pp = {pp} x {virtual_pp} = {stages}"
    yield from _schedule(config)
    if pp > layers:
        yield (
            "parallel.pp",
            f"{pp} stages are more than model.num_layers = {layers}, and each needs a layer; use at most {layers}",
        )
    elif stages > layers:
        yield (
            "parallel.virtual_pp",
            f"{product} stages are more than model.num_layers = {layers}, and each needs a layer; "
            f"use at most {layers // pp}",
        )
    if partition is None:
        return
    if len(partition) != stages:
        yield (
            "parallel.partition",
            f"has {len(partition)} stages and {product}; give one number of layers for each of {stages} stages",
        )
    if min(partition, default=1) < 1:
        yield (
            "parallel.partition",
            f"stage {partition.index(min(partition))} (counted from 0) has no layer; each needs at least 1",
        )
    elif sum(partition) != layers:
        yield (
            "parallel.partition",
            f"{' + '.join(map(str, partition))} = {sum(partition)} layers and model.num_layers = {layers}; "
            "the sum must be the same",
        )


def _schedule(config: Config) -> Problems:
    schedule, pp, virtual_pp = config.parallel.schedule, config.parallel.pp, config.parallel.virtual_pp
    if virtual_pp > 1 and pp == 1:
        yield (
            "parallel.virtual_pp",
            f"{virtual_pp} stages per process have no meaning with parallel.pp = 1, where nobody waits; leave it out",
        )
    elif virtual_pp > 1 and schedule in ("gpipe", "zero_bubble"):
        yield (
            "parallel.schedule",
            f"{schedule} has one stage per process and parallel.virtual_pp = {virtual_pp}; use interleaved, or leave "
            "out parallel.virtual_pp",
        )
    elif virtual_pp == 1 and schedule == "interleaved":
        yield (
            "parallel.schedule",
            "interleaved needs parallel.virtual_pp above 1; raise that, or use gpipe or 1f1b",
        )
    if schedule == "zero_bubble" and config.train.recompute != "none":
        yield (
            "parallel.schedule",
            f"zero_bubble puts off the matrices' gradients and keeps what they are made of, which train.recompute = "
            f"{config.train.recompute} is not to keep; use 1f1b, or train.recompute none",
        )
    if schedule == "zero_bubble" and config.zero.stage > 1:
        yield (
            "parallel.schedule",
            f"zero_bubble holds whole gradients from one part of a backward to the other, which zero.stage = "
            f"{config.zero.stage} is not to hold; use 1f1b, or zero.stage 1",
        )


def _sequence(config: Config) -> Problems:
    model, length = config.model, config.data.seq_length
    if model.position == "learned" and length > model.max_position_embeddings:
        yield (
            "data.seq_length",
            f"{length} tokens are more than model.max_position_embeddings = {model.max_position_embeddings} "
            f"(model.position = learned); use at most {model.max_position_embeddings}, or raise that to {length}",
        )
    eod = config.data.eod_id
    if eod is not None and eod >= model.vocab_size:
        yield (
            "data.eod_id",
            f"{eod} is outside the vocabulary of model.vocab_size = {model.vocab_size}; "
            f"use at most {model.vocab_size - 1}",
        )


def _zero(config: Config) -> Problems:
    zero, stage = config.zero, f"zero.stage = {config.zero.stage}"
    if zero.stage < 3:
        for field, unusual in (
            ("parallel.keep_gathered", config.parallel.keep_gathered),
            ("zero.reshard_after_forward", not zero.reshard_after_forward),
            ("zero.zero_hpz_partition_size", zero.zero_hpz_partition_size > 1),
        ):
            if unusual:
                yield field, f"has no meaning with {stage}, which keeps parameters whole; leave it out or use 3"
    elif config.parallel.keep_gathered and not zero.reshard_after_forward:
        yield "zero.reshard_after_forward", "parallel.keep_gathered says that already; leave out one of the two"
    if zero.mics_shard_size and not zero.stage:
        yield "zero.mics_shard_size", f"has no meaning with {stage}, which cuts nothing; use 1, 2 or 3"
    if zero.mics_shard_size and zero.zero_hpz_partition_size > 1:
        yield (
            "zero.zero_hpz_partition_size",
            f"{zero.zero_hpz_partition_size} would keep a second copy near, where zero.mics_shard_size = "
            f"{zero.mics_shard_size} keeps the first one near already; leave out one of the two",
        )


def _cuda_graph(config: Config) -> Problems:
    """A graph repeats kernels at fixed addresses: whatever needs the host inside of a step is out."""
    zero, train = config.zero, config.train
    if not train.cuda_graph:
        return
    leaves = zero.offload_optimizer.device != "none"
    draws = config.model.known and config.model.architecture.attention_dropout_rate > 0
    for field, stands in (
        ("zero.stage", zero.stage > 1 and f"{zero.stage} lets go of memory within a step; use 0 or 1"),
        ("zero.offload_optimizer.device", leaves and "not none: gradients leave within a step; use none"),
        ("train.offload_activations", train.offload_activations and "true: the host takes part in a step; use false"),
        ("log.timeline", config.log.timeline and "set: it records what the host issues one by one; leave it out"),
        ("model.attention_dropout", draws and "above 0, whose random state the host keeps; use 0"),
    ):
        if stands:
            yield "train.cuda_graph", f"does not go with {field} {stands}"


def _offload(config: Config) -> Problems:
    """Rules of what is kept off the device."""
    zero, state, parameters = config.zero, config.zero.offload_optimizer, config.zero.offload_param
    stage = f"zero.stage = {zero.stage}"
    if state.device != "none" and not zero.stage:
        yield (
            "zero.offload_optimizer.device",
            f"{state.device} has no meaning with {stage}; use 1, 2 or 3, which on one process cut nothing",
        )
    for section, own in (("zero.offload_optimizer", state), ("zero.offload_param", parameters)):
        if own.device == "nvme" and not own.nvme_path:
            yield (
                f"{section}.nvme_path",
                f"is missing, and {section}.device = nvme; give a directory on a fast local disk",
            )
    if parameters.device == "nvme" and state.masters != "fp32":
        yield (
            "zero.offload_optimizer.masters",
            f"{state.masters} is made of parameters in host memory, and zero.offload_param.device = nvme; use fp32",
        )
    if state.device == "nvme" and config.checkpoint.async_save:
        yield (
            "checkpoint.async_save",
            "would copy to host memory what zero.offload_optimizer.device = nvme keeps out of it; leave out one of the "
            "two",
        )
    for name in ("nvme_path", "ratio", "moments", "masters"):
        value = getattr(state, name)
        if state.device == "none" and value != type(state).model_fields[name].default:
            yield (
                f"zero.offload_optimizer.{name}",
                f"{value} needs zero.offload_optimizer.device cpu or nvme: all state is on the device, in float32",
            )
    if parameters.device == "none" and parameters.nvme_path:
        yield (
            "zero.offload_param.nvme_path",
            f"{parameters.nvme_path} needs zero.offload_param.device nvme: parameters are on the device",
        )
    if state.device != "none" and state.masters == "split" and parameters.device == "none":
        yield (
            "zero.offload_optimizer.masters",
            "split is the bits that 16-bit parameters in host memory lack; use zero.offload_param.device cpu with "
            "zero.stage 3, or masters fp32",
        )
    if config.train.offload_activations and config.train.recompute != "full":
        yield (
            "train.offload_activations",
            f"keeps layers' inputs alone, and train.recompute = {config.train.recompute}; use train.recompute full",
        )
    if state.masters != "fp32" and config.train.precision not in ("bf16", "auto"):
        yield (
            "zero.offload_optimizer.masters",
            f"{state.masters} goes with bfloat16 parameters, and train.precision = {config.train.precision}; use bf16, "
            "or zero.offload_optimizer.masters fp32",
        )
    if parameters.device != "none" and zero.stage < 3:
        yield (
            "zero.offload_param.device",
            f"{parameters.device} has no meaning with {stage}, which keeps parameters whole; use 3",
        )
    if parameters.device != "none" and zero.zero_hpz_partition_size > 1:
        yield (
            "zero.zero_hpz_partition_size",
            "would keep a second copy on the devices of what zero.offload_param.device keeps off them; leave out one "
            "of the two",
        )


def _data(config: Config) -> Problems:
    data = config.data
    if data.split is not None and data.valid is not None:
        yield "data.split", "would split data.train, and data.valid is given; leave out one of the two"


def _data_files(config: Config) -> Problems:
    data = config.data
    if data.train is None:
        yield "data.train", "nothing to train on; give the prefix of a .bin/.idx pair made by data/preprocess.py"
    if config.train.eval_interval and data.valid is None and data.split is None:
        yield (
            "data.valid",
            f"train.eval_interval = {config.train.eval_interval} needs evaluation data; give data.valid or data.split, "
            "or set train.eval_interval to 0",
        )


def _ramp_up(config: Config) -> Problems:
    ramp_up, full = config.train.rampup_batch_size, config.train.global_batch_size
    if ramp_up is None:
        return
    start, increment, _ = ramp_up
    if start >= full:
        yield (
            "train.rampup_batch_size",
            f"starts at {start}, which is not below train.global_batch_size = {full}; start lower, or leave it out",
        )
    elif (full - start) % increment:
        yield (
            "train.rampup_batch_size",
            f"increments of {increment} do not lead from {start} to train.global_batch_size = {full}; use "
            f"{either(divisors(full - start))}",
        )


def _optimizer(config: Config) -> Problems:
    optimizer, train, steps = config.optimizer, config.train, config.train.steps
    if optimizer.min_lr > optimizer.lr:
        yield (
            "optimizer.min_lr",
            f"{optimizer.min_lr:g} is above optimizer.lr = {optimizer.lr:g}; use at most {optimizer.lr:g}",
        )
    if optimizer.warmup_steps > steps:
        yield (
            "optimizer.warmup_steps",
            f"{optimizer.warmup_steps} are more than train.steps = {steps}; use at most {steps}",
        )
    decay = optimizer.decay_steps
    if optimizer.schedule == "wsd" and decay == 0:
        yield (
            "optimizer.decay_steps",
            f"optimizer.schedule = wsd needs the number of last steps in which the learning rate falls, "
            f"e.g. {max(1, steps // 10)} of train.steps = {steps}",
        )
    elif optimizer.schedule != "wsd" and decay:
        yield (
            "optimizer.decay_steps",
            f"{decay} has no meaning with optimizer.schedule = {optimizer.schedule}; leave it out or use wsd",
        )
    elif optimizer.warmup_steps <= steps < optimizer.warmup_steps + decay:
        yield (
            "optimizer.decay_steps",
            f"optimizer.warmup_steps + {decay} = {optimizer.warmup_steps + decay} are more than train.steps = {steps}; "
            f"use at most {steps - optimizer.warmup_steps}",
        )
    if train.min_loss_scale > train.initial_loss_scale:
        yield (
            "train.min_loss_scale",
            f"{train.min_loss_scale:g} is above train.initial_loss_scale = {train.initial_loss_scale:g}; "
            f"use at most {train.initial_loss_scale:g}",
        )


def _checkpoint(config: Config) -> Problems:
    checkpoint, train = config.checkpoint, config.train
    if config.watch.bad_step == "rollback" and not (checkpoint.dir and checkpoint.save_interval):
        yield (
            "watch.bad_step",
            "rollback needs checkpoints to go back to; give checkpoint.dir and checkpoint.save_interval, or use skip",
        )
    if checkpoint.dir is None:
        for name in ("save_interval", "keep", "async_save"):
            if value := getattr(checkpoint, name):
                yield f"checkpoint.{name}", f"{value} needs a place to save; give checkpoint.dir, or leave it out"
        if train.time_limit:
            yield (
                "train.time_limit",
                f"{train.time_limit:g} minutes, then the run saves and stops; give checkpoint.dir, or leave it out",
            )

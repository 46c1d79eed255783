"""Every key that DeepSpeed 0.19 knows, and those of older releases that files still have: what becomes of it here.

The one owner of the keys: the reader obeys this table, and docs/from-deepspeed.md shows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from megazero.ds_config.kinds import ANYTHING, BOOLEAN, DTYPE, PERIOD, TEXT, TEXTS, Kind, choice, integer, number


class Fate(Enum):
    """USED: it is in the typed tree. NOT_NEEDED: any value is taken and changes nothing. LACKING: a value that asks
    for what megazero does not have is an error.
    """

    USED = "used"
    NOT_NEEDED = "not needed"
    LACKING = "not here"


@dataclass(frozen=True)
class Key:
    """``path``: sections joined by dots. ``here``: what it means, why it is not needed, or what it is that lacks.

    ``default``: where it is absent, null, or an "auto" that nobody resolves; of a LACKING key the value that asks for
    nothing. ``switch``: of a LACKING section, the key in it that turns it on (the others are not looked at);
    None: whatever it holds does.
    """

    path: str
    kind: Kind
    default: Any
    fate: Fate
    here: str
    switch: str | None = None


def _used(name: str, kind: Kind, default: Any, here: str) -> Key:
    return Key(name, kind, default, Fate.USED, here)


def _idle(name: str, kind: Kind, default: Any, here: str) -> Key:
    return Key(name, kind, default, Fate.NOT_NEEDED, here)


def _lacks(name: str, kind: Kind, default: Any, here: str) -> Key:
    return Key(name, kind, default, Fate.LACKING, here)


def _lacks_section(name: str, here: str, switch: str | None = "enabled") -> Key:
    return Key(name, ANYTHING, None, Fate.LACKING, here, switch=switch)


def _section(prefix: str, *keys: Key) -> Iterator[Key]:
    return (replace(key, path=f"{prefix}.{key.path}") for key in keys)


_COUNT, _SIZE, _ANY_NUMBER = integer(1), integer(0), number()
_TIER = choice("none", "cpu", "nvme")
_FOR_NVME = "files are read and written in whole pieces, by threads of their own"
_FOR_PARAM_NVME = "parameters pass from files through three buffers of the largest block's size"
_IN_MODULE = "the PipelineModule says it"

_BATCH = (
    _used("train_batch_size", _COUNT, None, "samples per step, over all processes and accumulation steps"),
    _used("train_micro_batch_size_per_gpu", _COUNT, None, "samples per forward pass on one process"),
    _used("gradient_accumulation_steps", _COUNT, None, "forward passes per step on one process"),
    _lacks("managed_gradient_accumulation", BOOLEAN, True, "boundaries set by hand; `no_sync` is there"),
    _used("dataloader_drop_last", BOOLEAN, False, "leave out the last batch of `training_data` where it is not full"),
)

_STEP = (
    _used("gradient_clipping", number(0), 1.0, "largest global L2 norm of the gradient; 0: no clipping"),
    _idle("prescale_gradients", BOOLEAN, False, "sums are taken in the dtype of accumulation and divided once"),
    _idle("gradient_predivide_factor", _ANY_NUMBER, 1.0, "as above; the result is the mean either way"),
    _lacks("gradient_allreduce_op", choice("mean", "sum"), "mean", "a sum over processes instead of the mean"),
    _used(
        "communication_data_type",
        DTYPE,
        None,
        "must be `data_types.grad_accum_dtype`: gradients are reduced as they are accumulated",
    ),
    _idle("seq_parallel_communication_data_type", DTYPE, None, "no Ulysses sequence parallelism to use it"),
    _idle("disable_allgather", BOOLEAN, False, "parameters are gathered in place"),
    _used(
        "zero_allow_untested_optimizer",
        BOOLEAN,
        False,
        "take an optimizer object above stage 0 though nobody here knows whether it is element-wise",
    ),
    _idle("zero_force_ds_cpu_optimizer", BOOLEAN, True, "any optimizer runs on the host; Adam and AdamW overlapped"),
    _used("seed", integer(0), None, "of the order of `training_data`; absent: torch's"),
)

_ZERO = _section(
    "zero_optimization",
    _used("stage", integer(0, 3), 0, "0: nothing is sharded; 1: optimizer state; 2: gradients too; 3: parameters too"),
    _used("overlap_comm", BOOLEAN, True, "collectives on a stream of their own; DeepSpeed's default is stage 3 only"),
    _used("contiguous_gradients", BOOLEAN, True, "gradients accumulate in one buffer per block"),
    _used("reduce_bucket_size", _COUNT, 500_000_000, "elements of gradients reduced at a time, in whole blocks"),
    _used("allgather_bucket_size", _COUNT, 500_000_000, "elements of updated parameters gathered at a time"),
    _used("stage3_prefetch_bucket_size", _SIZE, 50_000_000, "elements of parameters gathered ahead of use"),
    _used("stage3_param_persistence_threshold", _SIZE, 100_000, "parameters of fewer elements stay whole"),
    _used("stage3_max_live_parameters", _SIZE, 1_000_000_000, "elements of parameters that are whole at one time"),
    _used("stage3_gather_16bit_weights_on_model_save", BOOLEAN, False, "`save_16bit_model` writes whole weights"),
    _used(
        "mics_shard_size", integer(-1), -1, "processes that share one set of shards, replicated over the rest; -1: all"
    ),
    _used("zero_hpz_partition_size", _SIZE, 1, "processes of a node that hold a second copy for backward; 1: none"),
    _used("offload_optimizer.device", _TIER, "none", "where float32 masters and moments are: see offload.md"),
    _used("offload_optimizer.ratio", number(0, 1), 1.0, "share of them that is not on the device, in whole blocks"),
    _used("offload_optimizer.nvme_path", TEXT, None, "directory of their files"),
    _used("offload_optimizer.pin_memory", BOOLEAN, True, "pinned host memory; DeepSpeed's default is false"),
    _used("offload_optimizer.buffer_count", integer(2), 4, "pieces of an update that are on their way at once"),
    _used("offload_optimizer.pipeline_read", BOOLEAN, True, "read ahead of the update; DeepSpeed's default is false"),
    _used("offload_optimizer.pipeline_write", BOOLEAN, True, "write beside the update; DeepSpeed's default is false"),
    _idle("offload_optimizer.fast_init", BOOLEAN, False, "files are made without being written"),
    _idle("offload_optimizer.super_offload", BOOLEAN, False, "copies and updates always overlap"),
    _idle("offload_optimizer.cpuadam_cores_perc", number(0, 1), 0.8, "a machine's processes share out all its cores"),
    _used("offload_param.device", _TIER, "none", "where parameters that stage 3 cuts are; no effect below it"),
    _used("offload_param.pin_memory", BOOLEAN, True, "pinned host memory; DeepSpeed's default is false"),
    _used("offload_param.nvme_path", TEXT, None, "directory of their files"),
    _idle("offload_param.buffer_count", _SIZE, 5, _FOR_PARAM_NVME),
    _idle("offload_param.buffer_size", _SIZE, 100_000_000, _FOR_PARAM_NVME),
    _idle("offload_param.max_in_cpu", _SIZE, 1_000_000_000, _FOR_PARAM_NVME),
    _used("cpu_offload", BOOLEAN, False, "an older name of offload_optimizer.device cpu"),
    _used("cpu_offload_param", BOOLEAN, False, "an older name of offload_param.device cpu"),
    _idle("cpu_offload_use_pin_memory", BOOLEAN, None, "see offload_optimizer.pin_memory"),
    _idle("sub_group_size", _SIZE, 1_000_000_000, "the update goes in pieces that stay in the cores' caches"),
    _lacks("zero_quantized_weights", BOOLEAN, False, "quantised gathering (ZeRO++)"),
    _lacks("zero_quantized_nontrainable_weights", BOOLEAN, False, "quantised frozen weights (ZeRO++)"),
    _lacks("zero_quantized_gradients", BOOLEAN, False, "quantised reduction (ZeRO++)"),
    _lacks_section("zeropp_loco_param", "error feedback of quantised gradients", switch=None),
    _lacks_section("zenflow", "ZenFlow", switch=None),
    _lacks("ignore_unused_parameters", BOOLEAN, True, "an error for unused parameters: here their gradient is zero"),
    _lacks("stage3_model_persistence_threshold", _SIZE, 2**63 - 1, "a limit on all persistent parameters together"),
    _idle("reduce_scatter", BOOLEAN, True, "each stage has its collective: 0 all-reduce, above it reduce-scatter"),
    _idle("allgather_partitions", BOOLEAN, True, "always all-gather"),
    _idle("use_multi_rank_bucket_allreduce", BOOLEAN, True, "buckets are whole blocks, reduced in place"),
    _idle("round_robin_gradients", BOOLEAN, False, "every process owns an equal slice of every block"),
    _idle("parameter_alignment", BOOLEAN, False, "parameters are always aligned"),
    _idle("compute_grad_norm", BOOLEAN, True, "the norm comes with the one reduction per step"),
    _idle("load_from_fp32_weights", BOOLEAN, True, "checkpoints hold the float32 masters"),
    _idle("elastic_checkpoint", BOOLEAN, False, "any number of processes loads any checkpoint"),
    _idle("pipeline_loading_checkpoint", BOOLEAN, False, "loading reads only what a process holds"),
    _idle("legacy_stage1", BOOLEAN, False, "one implementation of all stages"),
    _idle("stage3_max_reuse_distance", _SIZE, 1_000_000_000, "a block is freed after use, prefetched before the next"),
    _idle("stage3_module_granularity_threshold", _SIZE, 0, "parameters are gathered by block, not by module"),
    _idle("stage3_use_all_reduce_for_fetch_params", BOOLEAN, False, "gathering is in place, without copies"),
    _idle("stage3_allgather_sequential", BOOLEAN, False, "gathering is in place, without a bucket to copy to"),
    _idle("leaf_module.classes", TEXTS, (), "parameters are gathered by block, so no module needs to be a leaf"),
    _idle("leaf_module.names", TEXTS, (), "as above"),
    _idle("leaf_module.name_suffixes", TEXTS, (), "as above"),
    _idle("mics_hierarchical_params_gather", BOOLEAN, False, "shards are gathered inside their group"),
    _idle("memory_efficient_linear", BOOLEAN, True, "gathered weights are not saved for backward"),
    _idle("override_module_apply", BOOLEAN, True, "`GatheredParameters` gives whole weights"),
    _idle("log_trace_cache_warnings", BOOLEAN, False, "there is no trace to go stale"),
    _idle("enable_sanity_checks", BOOLEAN, False, "a parameter's state is checked at each use"),
    _idle("save_muon_momentum_buffer_in_memory", BOOLEAN, False, "belongs to optimizers of whole tensors on NVMe"),
)

_PRECISION = (
    *_section(
        "fp16",
        _used("enabled", BOOLEAN, False, "parameters and activations in float16, masters in float32"),
        _used("auto_cast", BOOLEAN, False, "floating-point inputs of the model are cast to float16"),
        _used("loss_scale", number(0), 0.0, "fixed factor on the loss; 0: dynamic"),
        _used("initial_scale_power", integer(0, 126), 16, "dynamic: the first factor is 2 to this power"),
        _used("loss_scale_window", _COUNT, 1000, "dynamic: steps without overflow after which it doubles"),
        _used("hysteresis", _COUNT, 2, "dynamic: overflows after which it halves"),
        _used("consecutive_hysteresis", BOOLEAN, False, "dynamic: a step without overflow starts that count anew"),
        _used("min_loss_scale", number(above=0), 1.0, "dynamic: it halves no further"),
        _lacks("fp16_master_weights_and_grads", BOOLEAN, False, "16-bit masters"),
    ),
    *_section(
        "bf16",
        _used("enabled", BOOLEAN, False, "parameters and activations in bfloat16, masters in float32"),
        _idle("immediate_grad_update", BOOLEAN, False, "gradients accumulate as they come"),
        _idle("check_grad_overflow", BOOLEAN, True, "every step is checked, whatever the precision"),
        _used(
            "bf16_master_weights_and_grads",
            BOOLEAN,
            False,
            "with offload_optimizer: no masters but the bfloat16 parameters, rounded at random; gradients in bfloat16",
        ),
        _used("bf16_optimizer_states", BOOLEAN, False, "with offload_optimizer: bfloat16 moments, rounded at random"),
    ),
    *_section(
        "data_types",
        _used("grad_accum_dtype", DTYPE, "fp32", "fp32 or bf16; DeepSpeed's default is the parameters' dtype"),
        _used("param_dtype", DTYPE, None, "must be what fp16 and bf16 say"),
        _used("buffer_dtype", DTYPE, None, "unset, buffers keep their dtype; DeepSpeed's default is the parameters'"),
        _idle("keep_in_fp32_modules", ANYTHING, "auto", "buffers keep their dtype"),
    ),
    _lacks_section("torch_autocast", "torch.autocast; use bf16 or fp16"),
    _lacks_section("amp", "Apex; use bf16 or fp16"),
)

_OPTIMIZER = (
    *_section(
        "optimizer",
        _used("type", TEXT, None, "Adam, AdamW, Lion, or a class of torch.optim; see below"),
        _used("params", ANYTHING, None, "arguments of that class"),
        _idle("legacy_fusion", BOOLEAN, False, "updates run on flat shards"),
    ),
    *_section(
        "scheduler",
        _used("type", TEXT, None, "one of the five below, or a class of torch.optim.lr_scheduler"),
        _used("params", ANYTHING, None, "arguments of that class"),
    ),
)

_LOG = (
    _used("steps_per_print", PERIOD, None, "steps between printed lines; absent: none"),
    _used("wall_clock_breakdown", BOOLEAN, False, "print the time of forward, backward and step"),
    _used("dump_state", BOOLEAN, False, "print these settings as they were read, at the start"),
    *_section(
        "comms_logger",
        _used("enabled", BOOLEAN, False, "count collectives: number, elements, time"),
        _used("verbose", BOOLEAN, False, "print each as it is issued"),
        _used("prof_all", BOOLEAN, True, "all kinds of collective"),
        _used("prof_ops", TEXTS, (), "these kinds only"),
        _used("debug", BOOLEAN, False, "name the caller as well"),
    ),
    *_section(
        "tensorboard",
        _used("enabled", BOOLEAN, False, "write TensorBoard events"),
        _used("output_path", TEXT, "", "directory"),
        _used("job_name", TEXT, "DeepSpeedJobName", "directory in it"),
    ),
    *_section(
        "wandb",
        _used("enabled", BOOLEAN, False, "log to Weights & Biases"),
        _used("project", TEXT, "deepspeed", "its project"),
        _used("group", TEXT, None, "its group of runs"),
        _used("team", TEXT, None, "its entity"),
    ),
    *_section(
        "csv_monitor",
        _used("enabled", BOOLEAN, False, "write one CSV file per metric"),
        _used("output_path", TEXT, "", "directory"),
        _used("job_name", TEXT, "DeepSpeedJobName", "directory in it"),
    ),
    _lacks_section("comet", "Comet; tensorboard, wandb and csv_monitor are there"),
    _lacks_section("flops_profiler", "the FLOPs profiler; metrics have throughput and MFU"),
    _idle("memory_breakdown", BOOLEAN, False, "metrics have the peak of memory"),
    _idle("timers.throughput.enabled", BOOLEAN, True, "throughput is always measured"),
    _idle("timers.throughput.synchronized", BOOLEAN, True, "measured without making the GPU wait"),
    _idle("log_level", TEXT, None, "logging is set up by its user"),
    _idle("vocabulary_size", _COUNT, None, "a hint about alignment only"),
    _idle("disable_python_gc", BOOLEAN, False, "garbage collection is under control"),
)

_CHECKPOINT = (
    *_section(
        "checkpoint",
        _used("async_save", BOOLEAN, False, "megazero's own: save while training goes on"),
        _used("tag_validation", choice("Ignore", "Warn", "Fail"), "Warn", "where processes give different tags"),
        _lacks("use_node_local_storage", BOOLEAN, False, "a disk per node: all processes must see the directory"),
        _idle("load_universal", BOOLEAN, False, "any layout loads any checkpoint"),
        _idle("parallel_write.pipeline_stage", BOOLEAN, False, "every process writes its own file"),
        _idle("checkpoint_serialization", BOOLEAN, True, "safetensors"),
        _idle("writer", ANYTHING, None, "files are written straight from memory"),
    ),
    *_section(
        "aio",
        *(_idle(name, _COUNT, default, _FOR_NVME) for name, default in (("block_size", 2**20), ("queue_depth", 8))),
        _idle("intra_op_parallelism", _COUNT, 1, _FOR_NVME),
        _idle("thread_count", _COUNT, 1, _FOR_NVME),
        *(_idle(name, BOOLEAN, default, _FOR_NVME) for name, default in (("single_submit", False), ("use_gds", False))),
        _idle("overlap_events", BOOLEAN, True, _FOR_NVME),
    ),
    *_section(
        "activation_checkpointing",
        _idle(
            "partition_activations",
            BOOLEAN,
            False,
            "shares activations over tensor parallelism, which a foreign model does not have",
        ),
        _idle("contiguous_memory_optimization", BOOLEAN, False, "torch's allocator does it"),
        _idle("number_checkpoints", _COUNT, None, "belongs to contiguous_memory_optimization"),
        _idle("synchronize_checkpoint_boundary", BOOLEAN, False, "nothing to wait for"),
        _lacks(
            "cpu_checkpointing",
            BOOLEAN,
            False,
            "activations of other models in host memory; pretrain/gpt.py has train.offload_activations",
        ),
        _lacks("profile", BOOLEAN, False, "timing of recomputation"),
    ),
)

_OTHER = (
    _lacks("sequence_parallel_size", _COUNT, 1, "Ulysses sequence parallelism"),
    _idle("use_data_before_expert_parallelism", BOOLEAN, False, "no expert parallelism"),
    _lacks_section("tensor_parallel", "tensor parallelism of foreign models", switch="autotp_size"),
    _lacks_section("expert_parallel", "expert parallelism"),
    *_section(
        "pipeline",
        _used("activation_checkpoint_interval", _SIZE, 0, "above 0: in place of the PipelineModule's"),
        _idle("stages", ANYTHING, "auto", f"{_IN_MODULE}: `num_stages`"),
        _idle("partition", TEXT, "best", f"{_IN_MODULE}: `partition_method`"),
        _idle("seed_layers", BOOLEAN, False, f"{_IN_MODULE}: `seed_layers`"),
        _idle("pipe_partitioned", BOOLEAN, True, "stages pass whole tensors"),
        _idle("grad_partitioned", BOOLEAN, True, "stages pass whole tensors"),
        _idle("use_reentrant", BOOLEAN, True, "recomputation is never reentrant"),
    ),
    _lacks_section("autotuning", "autotuning"),
    _lacks_section("compile", "DeepCompile; torch.compile the model", switch="deepcompile"),
    _lacks_section("data_efficiency", "curriculum learning and token dropping"),
    _lacks_section("hybrid_engine", "the hybrid engine"),
    _lacks_section("weight_quantization", "quantised weights", switch=None),
    _lacks_section("datastates_ckpt", "DataStates; checkpoint.async_save is there", switch=None),
    *(
        _lacks_section(name, f"{what}, which DeepSpeed itself has dropped")
        for name, what in (
            ("nebula", "Nebula"),
            ("quantize_training", "quantisation"),
            ("eigenvalue", "quantisation by eigenvalue"),
            ("elasticity", "elastic training"),
            ("curriculum_learning", "curriculum learning"),
            ("progressive_layer_drop", "layer dropping"),
        )
    ),
    _lacks_section("compression_training", "compression, which DeepSpeed itself has dropped", switch=None),
    _lacks_section("sparse_attention", "sparse attention, which DeepSpeed itself has dropped", switch=None),
    _lacks("sparse_gradients", BOOLEAN, False, "sparse gradients, which DeepSpeed itself has dropped"),
    _lacks("graph_harvesting", BOOLEAN, False, "graph harvesting, which DeepSpeed itself has dropped"),
)

TITLES: dict[str, tuple[Key, ...]] = {
    "Batch": _BATCH,
    "Gradients": _STEP,
    "ZeRO": tuple(_ZERO),
    "Precision": _PRECISION,
    "Optimizer and scheduler": _OPTIMIZER,
    "Reports": _LOG,
    "Checkpoints and memory": _CHECKPOINT,
    "Other": _OTHER,
}
"""As the documentation groups them."""

KEYS: dict[str, Key] = {key.path: key for keys in TITLES.values() for key in keys}
SECTIONS: frozenset[str] = frozenset(
    path.rsplit(".", depth)[0] for path in KEYS for depth in range(1, path.count(".") + 1)
)
ALIASES: dict[str, str] = {
    "bfloat16": "bf16",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
    **{path.replace("stage3_", ""): path for path in KEYS if path.startswith("zero_optimization.stage3_")},
}
"""Other names that DeepSpeed takes: older ones, and those of stage 3 without their prefix."""

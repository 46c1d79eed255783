"""What a ds_config says, typed. Names are DeepSpeed's where megazero's own settings have none for the same thing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from megazero.ds_config import batch
from megazero.errors import ConfigError
from megazero.zero.offload.settings import Offload


@dataclass(frozen=True)
class OffloadOptimizer:
    """As config_tree.OffloadOptimizerSection; what DeepSpeed has no key for is as it is there."""

    device: str
    ratio: float
    nvme_path: str | None
    pin_memory: bool
    buffer_count: int
    pipeline_read: bool
    pipeline_write: bool
    moments: str = "fp32"
    masters: str = "fp32"
    buffer_size: int = Offload.buffer_size
    threads: int = Offload.threads


@dataclass(frozen=True)
class OffloadParam:
    device: str
    nvme_path: str | None
    pin_memory: bool


@dataclass(frozen=True)
class Zero:
    """Sizes are in elements. ``mics_shard_size``: processes in a shard group, the data-parallel ones unless set."""

    stage: int
    overlap_comm: bool
    contiguous_gradients: bool
    reduce_bucket_size: int
    allgather_bucket_size: int
    stage3_prefetch_bucket_size: int
    stage3_param_persistence_threshold: int
    stage3_max_live_parameters: int
    stage3_gather_16bit_weights_on_model_save: bool
    mics_shard_size: int
    zero_hpz_partition_size: int
    offload_optimizer: OffloadOptimizer
    offload_param: OffloadParam


@dataclass(frozen=True)
class Precision:
    """``dtype``: of parameters and activations; ``grad_dtype``: in which gradients accumulate and are reduced;
    ``buffer_dtype``: of floating-point buffers, None where they keep theirs.

    The rest is of float16. ``loss_scale``: a fixed factor, None where it is dynamic.
    """

    dtype: torch.dtype
    grad_dtype: torch.dtype
    buffer_dtype: torch.dtype | None
    auto_cast: bool
    loss_scale: float | None
    initial_loss_scale: float
    loss_scale_window: int
    hysteresis: int
    consecutive_hysteresis: bool
    min_loss_scale: float


@dataclass(frozen=True)
class OptimizerChoice:
    """``type``: Lion or a class of torch.optim; ``params``: its arguments. ``whole_tensors``: not for shards."""

    type: str
    params: Mapping[str, Any]
    whole_tensors: bool


@dataclass(frozen=True)
class SchedulerChoice:
    """``type``: one of DeepSpeed's five or a class of torch.optim.lr_scheduler; ``params``: its arguments."""

    type: str
    params: Mapping[str, Any]


@dataclass(frozen=True)
class CommsLogger:
    enabled: bool
    verbose: bool
    prof_all: bool
    prof_ops: tuple[str, ...]
    debug: bool


@dataclass(frozen=True)
class FileMonitor:
    """TensorBoard's events, or CSV files."""

    enabled: bool
    output_path: str
    job_name: str


@dataclass(frozen=True)
class WandbMonitor:
    enabled: bool
    project: str
    group: str | None
    team: str | None


@dataclass(frozen=True)
class Checkpoint:
    """``tag_validation``: Ignore, Warn or Fail."""

    async_save: bool
    tag_validation: str


@dataclass(frozen=True)
class Pipeline:
    """``activation_checkpoint_interval``: 0 where the PipelineModule says it."""

    activation_checkpoint_interval: int


@dataclass(frozen=True)
class DsConfig:
    """A whole ds_config, every "auto" settled.

    ``not_needed``: paths that were given and change nothing here. ``deferred``: "path = value" of each "auto" that
    nobody resolved, with the default it got.
    """

    train_batch_size: int
    train_micro_batch_size_per_gpu: int
    gradient_accumulation_steps: int
    gradient_clipping: float
    dataloader_drop_last: bool
    seed: int | None
    steps_per_print: int | None
    wall_clock_breakdown: bool
    dump_state: bool
    zero_allow_untested_optimizer: bool
    zero: Zero
    precision: Precision
    optimizer: OptimizerChoice | None
    scheduler: SchedulerChoice | None
    comms_logger: CommsLogger
    tensorboard: FileMonitor
    wandb: WandbMonitor
    csv_monitor: FileMonitor
    checkpoint: Checkpoint
    pipeline: Pipeline
    not_needed: tuple[str, ...]
    deferred: tuple[str, ...]

    def with_train_batch_size(self, total: int) -> DsConfig:
        """This with as many accumulation steps as make ``total`` of the same micro-batches. Raises ConfigError where
        none do."""
        if not isinstance(total, int) or isinstance(total, bool) or total < 1:
            raise ConfigError.single(batch.TOTAL, f"is {total!r}; use an integer of 1 or more")
        micro = self.train_micro_batch_size_per_gpu
        ranks = self.train_batch_size // (micro * self.gradient_accumulation_steps)
        settled, wrong = batch.settle({batch.TOTAL: total, batch.MICRO: micro, batch.STEPS: None}, ranks)
        if wrong:
            raise ConfigError(wrong)
        return replace(self, train_batch_size=total, gradient_accumulation_steps=settled.steps)

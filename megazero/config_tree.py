"""The sections of the settings tree: every field with its type, default, unit and meaning.

A field's description is its help text. Rules between fields are in config_rules.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from megazero.models.config import ModelConfig
from megazero.presets import PRESETS
from megazero.zero.offload.settings import Offload

Blend = tuple[tuple[float, str], ...]
RampUp = tuple[int, int, int]
"""First batch size, increment, and samples until the full one."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with ``over`` on top; mappings found in both are merged in turn.

    Where ``over`` has fields and ``base`` a plain value, the value stays: it is a mistake that validation names.
    """
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        if below is None or not isinstance(value, Mapping):
            result[key] = value
        elif isinstance(below, Mapping):
            result[key] = merged(below, value)
    return result


class ModelSection(ModelConfig):
    """The architecture: a preset's sizes, those found at init_from, or those given; given ones go over a preset's."""

    preset: str | None = Field(None, description="name of a published shape: " + ", ".join(PRESETS))
    init_from: str | None = Field(
        None, description="Hugging Face directory or megazero checkpoint that gives architecture and first weights"
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and isinstance(values.get("preset"), str):
            return merged(PRESETS.get(values["preset"], {}), values)
        return values

    @field_validator("preset")
    @classmethod
    def _known_preset(cls, name: str | None) -> str | None:
        if name is not None and name not in PRESETS:
            raise ValueError("unknown preset")
        return name

    @property
    def known(self) -> bool:
        """Whether the architecture is settled: always, save before an init_from has been read."""
        return self.init_from is None or self.model_fields_set >= set(ModelConfig.model_fields)

    @property
    def architecture(self) -> ModelConfig:
        """The sizes alone, without where they came from."""
        return ModelConfig(**{name: getattr(self, name) for name in ModelConfig.model_fields})


class ParallelSection(Section):
    """How the model is cut; world size / (tp x pp) copies of it share the data (dp)."""

    tp: int = Field(1, ge=1, description="processes that share each matrix (tensor parallelism)")
    pp: int = Field(1, ge=1, description="processes that share the layers (pipeline parallelism)")
    virtual_pp: int = Field(
        1, ge=1, description="stages per process of the pipeline, every pp-th one: less idle time, more transfers"
    )
    partition: tuple[int, ...] | None = Field(
        None,
        description="transformer layers of each of the pp x virtual_pp stages, first to last; unset: balanced by cost",
    )
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = Field(
        "1f1b", description="order of forward and backward in the pipeline; with virtual_pp > 1, 1f1b is interleaved"
    )
    sequence_parallel: Literal["auto"] | bool = Field(
        "auto", description="cut norms and dropout along the sequence too; auto: where tp > 1 divides the sequence"
    )
    keep_gathered: bool = Field(
        False, description="zero.stage 3: parameters stay whole from their first use in a step to their last"
    )
    vocab_multiple: int = Field(
        128, ge=1, description="rows; each tp rank's share of the vocabulary is padded to a multiple of this"
    )


class OffloadOptimizerSection(Section):
    """Masters and moments off the device; the CPU updates them."""

    device: Literal["none", "cpu", "nvme"] = Field(
        "none", description="where float32 masters and moments are kept: on the device, in host memory, in files"
    )
    ratio: float = Field(
        1.0, ge=0, le=1, allow_inf_nan=False, description="share of it, in whole layers; the rest stays on the device"
    )
    nvme_path: str | None = Field(None, description="nvme: directory of the files, on a fast local disk")
    pin_memory: bool = Field(True, description="pinned host memory for what the device copies from and to")
    buffer_count: int = Field(4, ge=2, description="pieces of an update that are on their way at once")
    buffer_size: int = Field(
        Offload.buffer_size, ge=64, multiple_of=64, description="elements of a piece, updated and moved as one"
    )
    pipeline_read: bool = Field(True, description="nvme: read the next pieces while one is updated")
    pipeline_write: bool = Field(True, description="nvme: write pieces while the next are updated")
    threads: int = Field(0, ge=0, description="of a process's update on a GPU machine; 0: its share of the cores")
    moments: Literal["fp32", "bf16"] = Field(
        "fp32", description="Adam's moments; bf16: half the memory, rounded at random"
    )
    masters: Literal["fp32", "split", "bf16"] = Field(
        "fp32",
        description="masters; split: the same values, as 16-bit parameters and the bits they lack; bf16: the "
        "parameters alone, rounded at random",
    )


class OffloadParamSection(Section):
    """Stage 3: 16-bit parameters off the device."""

    device: Literal["none", "cpu", "nvme"] = Field(
        "none", description="where a process keeps its share of the parameters: on the device, in host memory, in files"
    )
    nvme_path: str | None = Field(None, description="nvme: directory of the files, on a fast local disk")
    pin_memory: bool = Field(True, description="pinned host memory for them, or for what passes from files")


class ZeroSection(Section):
    """What the data-parallel processes share out instead of holding copies."""

    stage: int = Field(
        0, ge=0, le=3, description="0: nothing; 1: the optimizer state; 2: gradients too; 3: parameters too"
    )
    reduce_bucket_size: int = Field(
        40_000_000, ge=1, description="elements; gradients are reduced in buckets of whole layers up to this size"
    )
    allgather_bucket_size: int = Field(
        40_000_000, ge=1, description="elements; updated parameters are gathered in buckets up to this size"
    )
    stage3_prefetch_bucket_size: int = Field(
        50_000_000,
        ge=0,
        description="elements; layers used next are gathered ahead, at least one and up to this size; 0: none",
    )
    stage3_param_persistence_threshold: int = Field(
        100_000, ge=0, description="elements; parameters up to this size stay whole on every process"
    )
    stage3_max_live_parameters: int = Field(
        1_000_000_000, ge=0, description="elements; nothing is gathered ahead beyond this many"
    )
    reshard_after_forward: bool = Field(
        True, description="stage 3: let go of a layer between its forward and its backward, which gathers it again"
    )
    mics_shard_size: int = Field(
        0, ge=0, description="processes that share one copy of the model state, e.g. those of a node; 0: all of dp"
    )
    zero_hpz_partition_size: int = Field(
        0,
        ge=0,
        description="stage 3: processes of a node that keep a second copy of the parameters between them, from which "
        "backward gathers; 0: none",
    )
    offload_optimizer: OffloadOptimizerSection = OffloadOptimizerSection()
    offload_param: OffloadParamSection = OffloadParamSection()


class DataSection(Section):
    """Where tokens come from and how they become samples."""

    train: Blend | None = Field(
        None, description="prefix of a .bin/.idx pair, or a list of weight and prefix in turn (a blend)"
    )
    valid: Blend | None = Field(None, description="the same for evaluation; unset: nothing is taken from train")
    split: tuple[float, float] | None = Field(
        None, description="two shares, training and evaluation, into which train's documents are split; unset: no split"
    )
    seq_length: int = Field(1024, ge=1, description="tokens per sample")
    shuffle: bool = Field(True, description="permute the samples of each epoch")
    seed: int = Field(1234, ge=0, description="seed of the sample order")
    reset_at_document: bool = Field(
        False, description="restart positions and confine attention at document boundaries inside a sample"
    )
    mask_eod: bool = Field(False, description="take positions whose input is the end-of-document token out of the loss")
    eod_id: int | None = Field(
        None, ge=0, description="end-of-document token id; unset: the tokenizer's or the dataset's"
    )
    tokenizer: str | None = Field(
        None,
        description="to check vocabulary sizes and find eod_id: byte, gpt2:DIR, hf:FILE, sentencepiece:FILE or "
        "tiktoken:FILE",
    )

    @field_validator("train", "valid", mode="before")
    @classmethod
    def _as_blend(cls, value: Any) -> Any:
        """A prefix, weights and prefixes in turn, or pairs of them → pairs."""
        if isinstance(value, str):
            return ((1.0, value),)
        if not isinstance(value, list | tuple) or not value:
            return value
        if all(isinstance(part, list | tuple) for part in value):
            return value
        if len(value) == 1:
            return ((1.0, value[0]),)
        if len(value) % 2:
            raise ValueError("a blend alternates weight and prefix, as in 0.7 books 0.3 web")
        return tuple(zip(value[::2], value[1::2], strict=True))

    @field_validator("train", "valid")
    @classmethod
    def _weights(cls, blend: Blend | None) -> Blend | None:
        if blend is None:
            return None
        for weight, prefix in blend:
            if not 0 <= weight < float("inf"):
                raise ValueError(f"weight {weight:g} of {prefix} must be a number of at least 0")
        if not any(weight for weight, _ in blend):
            raise ValueError("no dataset has a weight above 0")
        return blend

    @field_validator("split")
    @classmethod
    def _shares(cls, split: tuple[float, float] | None) -> tuple[float, float] | None:
        if split is not None and not all(0 < share < float("inf") for share in split):
            raise ValueError("both shares must be above 0, as in 95 5")
        return split


class OptimizerSection(Section):
    """AdamW and its learning rate."""

    lr: float = Field(3e-4, ge=0, allow_inf_nan=False, description="highest learning rate")
    min_lr: float = Field(0.0, ge=0, allow_inf_nan=False, description="learning rate at the last step")
    schedule: Literal["cosine", "linear", "wsd", "constant"] = Field(
        "cosine", description="how the learning rate falls after warm-up; wsd: stays, then falls over decay_steps"
    )
    warmup_steps: int = Field(0, ge=0, description="steps over which the learning rate rises linearly from 0 to lr")
    decay_steps: int = Field(0, ge=0, description="wsd: last steps over which the learning rate falls to min_lr")
    betas: tuple[float, float] = Field((0.9, 0.95), description="decay rates of Adam's two moments, each in [0, 1)")
    eps: float = Field(1e-8, gt=0, allow_inf_nan=False, description="added to the root of Adam's second moment")
    weight_decay: float = Field(
        0.1, ge=0, allow_inf_nan=False, description="decoupled weight decay of tensors with two or more dimensions"
    )
    clip_grad_norm: float = Field(
        1.0, ge=0, allow_inf_nan=False, description="largest global L2 norm of the gradient; 0: no clipping"
    )

    @field_validator("betas")
    @classmethod
    def _rates(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError("both must be at least 0 and below 1, as in 0.9 0.95")
        return betas


_TIME = re.compile(r"(?:(\d+)-)?(\d+):([0-5]?\d):([0-5]?\d)")


class TrainSection(Section):
    """Length, batch, precision and running of the training."""

    steps: int = Field(1000, ge=1, description="optimizer steps of the whole run, those before a resume included")
    global_batch_size: int = Field(8, ge=1, description="samples per step, over all processes")
    rampup_batch_size: RampUp | None = Field(
        None,
        description="three numbers: the first steps' samples, an increment, and the samples over which these grow to "
        "global_batch_size, by one increment after another; unset: no growth",
    )
    micro_batch_size: int = Field(1, ge=1, description="samples per forward pass on one process")
    precision: Literal["auto", "bf16", "fp16", "fp32"] = Field(
        "auto", description="of parameters and activations; auto: bf16 on a GPU, fp32 on a CPU"
    )
    grad_dtype: Literal["fp32", "bf16"] = Field("fp32", description="in which gradients are accumulated and reduced")
    initial_loss_scale: float = Field(
        65536.0, ge=1, allow_inf_nan=False, description="fp16: factor on the loss at the first step"
    )
    loss_scale_window: int = Field(
        1000, ge=1, description="fp16: steps without overflow after which the loss scale doubles"
    )
    min_loss_scale: float = Field(1.0, gt=0, allow_inf_nan=False, description="fp16: the loss scale halves no further")
    recompute: Literal["none", "selective", "full"] = Field(
        "none",
        description="activations computed again in backward; selective: all but matrix products and attention; "
        "full: whole layers",
    )
    offload_activations: bool = Field(
        False, description="recompute full: layers' inputs are in host memory between forward and backward"
    )
    compile: Literal["auto"] | bool = Field("auto", description="torch.compile each layer; auto: on a GPU")
    cuda_graph: bool = Field(
        False,
        description="one process: forwards and backwards of a step are issued as one CUDA graph, which pays where "
        "layers are small; its memory is kept between steps",
    )
    deterministic: bool = Field(False, description="bitwise repeatable kernels on a GPU, slower")
    seed: int = Field(1234, ge=0, description="seed of initial weights and dropout")
    eval_interval: int = Field(0, ge=0, description="steps between evaluations; 0: none")
    eval_steps: int = Field(10, ge=1, description="global batches per evaluation")
    time_limit: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="minutes, or [DAYS-]HH:MM:SS, after which the run saves and stops; 0: none",
    )
    timeout: float = Field(
        600.0,
        gt=0,
        allow_inf_nan=False,
        description="seconds that a collective may wait for a missing process; then a report, and the run ends",
    )

    @field_validator("rampup_batch_size")
    @classmethod
    def _positive(cls, ramp_up: RampUp | None) -> RampUp | None:
        if ramp_up is not None and min(ramp_up) < 1:
            raise ValueError("start, increment and samples must each be at least 1, as in 32 32 500000")
        return ramp_up

    @property
    def batch_unit(self) -> int:
        """The largest number that divides every step's samples."""
        return math.gcd(self.global_batch_size, *(self.rampup_batch_size[:2] if self.rampup_batch_size else ()))

    @field_validator("time_limit", mode="before")
    @classmethod
    def _minutes(cls, value: Any) -> Any:
        if isinstance(value, str) and ":" in value:
            match = _TIME.fullmatch(value.strip())
            if match is None:
                raise ValueError(f"{value!r} is neither minutes nor [DAYS-]HH:MM:SS, as in 90 or 01:30:00")
            days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
            return (days * 24 + hours) * 60 + minutes + seconds / 60
        return value


class CheckpointSection(Section):
    """Where and how often the run is saved; with a directory its last step always is."""

    dir: str | None = Field(None, description="directory of this run's checkpoints; unset: nothing is saved")
    save_interval: int = Field(0, ge=0, description="steps between saves; 0: only at the end")
    keep: int = Field(0, ge=0, description="newest checkpoints that stay; 0: all")
    verify: bool = Field(
        True,
        description="read each checkpoint back after its save, in the background; keep does not count it before it is "
        "found good",
    )
    async_save: bool = Field(
        False, description="write while training goes on, from a copy in host memory of what each rank saves"
    )
    resume: str = Field(
        "auto", min_length=1, description="auto: the newest whole checkpoint in dir, if any; never; or a path"
    )


class LogSection(Section):
    """Where the numbers go."""

    interval: int = Field(10, ge=0, description="steps between logged lines; 0: none")
    jsonl: str | None = Field(None, description="path of a JSON-lines file of metrics; unset: none")
    events: str | None = Field(
        None,
        description="path of a JSON-lines file of starts, saves, skips, roll-backs, slow processes; unset: none",
    )
    tensorboard: str | None = Field(None, description="directory of TensorBoard events; unset: none")
    wandb: str | None = Field(None, description="Weights & Biases project; unset: none")
    timeline: str | None = Field(
        None, description="directory for the times of every action of logged steps, by pipeline rank; unset: none"
    )


class WatchSection(Section):
    """How a run notices what goes wrong: hangs, lost and slow processes, steps that are not to be trusted."""

    step_timeout: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="seconds that a step may take before the run ends with a report; 0: any, as long as it gets on",
    )
    peer_timeout: float = Field(
        60.0,
        ge=0,
        allow_inf_nan=False,
        description="seconds without a sign of life after which a process is lost and the run ends; 0: never",
    )
    bad_step: Literal["stop", "skip", "rollback"] = Field(
        "stop",
        description="what a spike, or a gradient that is not finite, does: the run stops; the update is left out; the "
        "run goes back to the newest good checkpoint, and on behind the samples it had read since",
    )
    max_rollbacks: int = Field(10, ge=1, description="rollback: of the whole run; where one more is needed, it stops")
    loss_spike: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="standard deviations above its late mean at which a step's loss is a spike; 0: none is",
    )
    replica_interval: int = Field(
        0, ge=0, description="steps between comparisons of the weights that several processes hold; 0: none"
    )
    straggler_factor: float = Field(
        1.3,
        ge=0,
        allow_inf_nan=False,
        description="a process that computes for this many times its stage's median is named in the log; 0: none",
    )

"""From settings to one rank's model: the one place that knows the order in which everything is applied.

Model on the meta device → tensor parallelism → fused pieces → recompute → compile → place of activations → ZeRO → who
makes the matrices' gradients. Nothing before ZeRO takes memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from megazero.config import Config
from megazero.models.config import ModelConfig
from megazero.models.context import ContextBuilder
from megazero.models.gpt import GPT
from megazero.models.mlp import gelu_tanh
from megazero.models.norm import LayerNorm, add_norm
from megazero.pipeline.partition import given_partition, layer_costs, partition_layers
from megazero.sharding import Replication, ShardSpec
from megazero.stage import DecoderStage
from megazero.tensor_parallel.mappings import TensorParallel
from megazero.tensor_parallel.parallelize import parallelize
from megazero.tensor_parallel.weight_products import own_forward
from megazero.topology import Topology
from megazero.zero.blocks import decoder_units
from megazero.zero.groups import data_parallel
from megazero.zero.hooks import install_hooks
from megazero.zero.offload.activations import HostActivations
from megazero.zero.offload.tier import TierMaker, claim_tier
from megazero.zero.settings import ZeroSettings
from megazero.zero.sharded import ShardedModel

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def precision_on(config: Config, device: torch.device) -> str:
    """What ``train.precision`` means on a device; a key of DTYPES."""
    asked = config.train.precision
    return ("bf16" if device.type == "cuda" else "fp32") if asked == "auto" else asked


def compiles_on(config: Config, device: torch.device) -> bool:
    """What ``train.compile`` means on a device."""
    return device.type == "cuda" if config.train.compile == "auto" else config.train.compile


def stage_layers(config: Config, model: ModelConfig) -> list[range]:
    """Global layer indices of every pipeline stage, ``parallel.virtual_pp`` stages per rank."""
    if config.parallel.partition is not None:
        return given_partition(config.parallel.partition, model.num_layers)
    costs = layer_costs(model, config.data.seq_length)
    return partition_layers(costs.layers, costs.first, costs.last, config.parallel.pp * config.parallel.virtual_pp)


def rank_layers(config: Config, model: ModelConfig, rank: int) -> list[range]:
    """Global layer indices of each stage that a pipeline rank holds: chunk c is stage c * pp + rank."""
    return stage_layers(config, model)[rank :: config.parallel.pp]


def describe_stage(
    config: Config, model: ModelConfig, coordinates: Mapping[str, int], tp: TensorParallel
) -> tuple[GPT, dict[str, ShardSpec]]:
    """The decoder of one rank on the meta device and the ShardSpec of each of its parameters, without any process."""
    pp, stage = config.parallel.pp, coordinates["pp"]
    layers = chain.from_iterable(rank_layers(config, model, stage))
    with torch.device("meta"):
        decoder = GPT(model, layers, first=stage == 0, last=stage == pp - 1)
    specs = parallelize(decoder, tp, config.parallel.vocab_multiple, model.tie_word_embeddings)
    if model.tie_word_embeddings and pp > 1:
        both = Replication("pp", (0, pp - 1), "partial")
        for name in ("embedding.word.weight", "head.weight"):
            if name in specs:
                specs[name] = specs[name].replicated_over(both)
    return decoder, specs


def build_stage(
    config: Config, model: ModelConfig, topology: Topology, dtype: torch.dtype, make_tier: TierMaker = claim_tier
) -> DecoderStage:
    """This rank's stage, its parameters in place but not yet given values. ``make_tier``: as of ShardedModel."""
    device = topology.device
    tp = TensorParallel(
        topology.layout.tp,
        topology.coordinates["tp"],
        config.sequence_parallel,
        topology.group("tp"),
    )
    decoder, specs = describe_stage(config, model, topology.coordinates, tp)
    compiles = compiles_on(config, device)
    splits = config.schedule == "zero_bubble"
    # Beside collectives, or products put aside, in a layer's graph the pieces have not been measured.
    if compiles and device.type == "cuda" and tp.size == 1 and not splits:
        fuse_layers(decoder)
    wrap_layers(decoder, config.train.recompute, compiles, tp.size, keeps_rng=model.attention_dropout_rate > 0)
    if config.train.offload_activations:
        # Outside of what is compiled: the copies are no part of its graph.
        kept = HostActivations(device)
        for layer in decoder.layers.values():
            layer.forward = _Placed(kept.around(layer.forward), own_forward, layer)
    leave_meta(decoder, dtype, device)
    zero, chunks = config.zero, rank_layers(config, model, topology.coordinates["pp"])
    sharded = ShardedModel(
        decoder,
        decoder_units(decoder, specs, chunks),
        data_parallel(topology, zero.mics_shard_size, zero.zero_hpz_partition_size, config.train.timeout),
        zero_settings(config),
        dtypes=dict.fromkeys(specs, dtype),
        grad_dtype=DTYPES[config.train.grad_dtype],
        device=device,
        make_tier=make_tier,
    )
    install_hooks(sharded)
    contexts = ContextBuilder(model, config.data.seq_length, device, config.train.seed)
    # What is computed again is there in backward only, too late for what forward hands out.
    catches = config.train.recompute == "none"
    return DecoderStage(decoder, chunks, sharded, contexts, tp, device, catches, splits)


def leave_meta(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Put parameters without elements in place of those on the meta device, one for one, so that ties stay ties."""
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in replaced:
                replaced[parameter] = nn.Parameter(torch.empty(0, dtype=dtype, device=device))
            setattr(module, name, replaced[parameter])


def zero_settings(config: Config) -> ZeroSettings:
    keeps, reshards = config.parallel.keep_gathered, config.zero.reshard_after_forward
    return ZeroSettings.of(config.zero, reshard_after_forward=reshards, keep_gathered=keeps)


def attention_backends(device: torch.device, deterministic: bool) -> AbstractContextManager:
    """torch's attention kernels in the order of preference for shapes that stay the same.

    From Hopper on cuDNN's is the fastest by far; it plans anew for each shape, and its backward adds in no fixed order.
    """
    if device.type != "cuda" or deterministic or torch.cuda.get_device_capability(device) < (9, 0):
        return nullcontext()
    return sdpa_kernel(
        [
            SDPBackend.CUDNN_ATTENTION,
            SDPBackend.FLASH_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION,
            SDPBackend.MATH,
        ],
        set_priority=True,
    )


# What selective recompute keeps: matrix products, attention and collectives. The rest is cheap to do again.
_KEPT = ("mm", "addmm", "bmm", "baddbmm")
_KEPT_PREFIXES = ("_scaled_dot_product", "all_reduce", "reduce_scatter", "all_gather", "wait_tensor")


def _keep(context, operation, *args, **kwargs) -> CheckpointPolicy:
    name = operation.name().split("::")[-1].split(".")[0]
    kept = name in _KEPT or name.startswith(_KEPT_PREFIXES)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


COMPILER_RECOMPUTES_FUNCTIONS = torch.__version__ >= "2.13"
"""Whether a compiled checkpoint lets go of what an autograd.Function in it saves."""


class _Placed:
    """What is called in place of what a module has. In a copy of the module, which is in no engine, that is back: it is
    what ``plain(*of)`` gives. A copied function would be the same one, on the original's parameters."""

    def __init__(self, call: Callable, plain: Callable, *of: Any) -> None:
        self._call, self._plain, self._of = call, plain, of

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __reduce__(self) -> tuple:
        return self._plain, self._of


def _itself(plain: Any) -> Any:
    return plain


def fuse_layers(decoder: GPT) -> None:
    """Put the pieces of models/fused into layers to be compiled for a GPU that have what they are for."""
    from megazero.models import fused  # triton comes with torch's CUDA builds only

    for layer in decoder.layers.values():
        norm, mlp = layer.mlp_norm, layer.mlp
        if isinstance(norm, LayerNorm) and norm.weight.numel() <= fused.MOST_FEATURES:
            layer.add_norm = _Placed(fused.add_norm, _itself, add_norm)
        if layer.attention.qkv.bias is not None:
            layer.attention.qkv.join = fused.join
        if mlp.activation is gelu_tanh and mlp.inner.bias is not None:
            mlp.bias_activation = _Placed(fused.bias_gelu, _itself, None)


def wrap_layers(decoder: GPT, recompute: str, compiles: bool, tp_size: int, keeps_rng: bool) -> None:
    """Recompute within what is compiled, so that the compiler leaves out what backward does not need.

    torch 2.11 would keep what the autograd.Functions of tensor parallelism save, which is nearly everything: there,
    full recompute goes around the compiled layer.
    """
    around = compiles and recompute == "full" and tp_size > 1 and not COMPILER_RECOMPUTES_FUNCTIONS
    if not around:
        apply_recompute(decoder, recompute, keeps_rng)
    if compiles:
        apply_compile(decoder)
    if around:
        apply_recompute(decoder, recompute, keeps_rng)


def apply_recompute(decoder: GPT, recompute: str, keeps_rng: bool) -> None:
    """Let each layer's backward compute its activations again: all of them (``full``), or all that are cheap."""
    if recompute == "none":
        return
    options = {"use_reentrant": False, "preserve_rng_state": keeps_rng}
    if recompute == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keep)
    for layer in decoder.layers.values():
        layer.forward = functools.partial(checkpoint, layer.forward, **options)


def apply_compile(decoder: GPT) -> None:
    """torch.compile each layer, the final norm and the loss. Hooks stay outside: they run in eager Python."""
    for layer in decoder.layers.values():
        _compile_forward(layer)
    if decoder.head is not None:
        _compile_forward(decoder.final_norm)
        plain = decoder.head.chunk_loss
        decoder.head.chunk_loss = _Placed(torch.compile(plain, fullgraph=True, dynamic=False), _itself, plain)


def _compile_forward(module: nn.Module) -> None:
    module.forward = _Placed(torch.compile(module.forward, fullgraph=True, dynamic=False), own_forward, module)

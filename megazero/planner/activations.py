"""Bytes of what autograd keeps of one micro-batch's forward pass until its backward pass.

The terms are those of Korthikanti et al. 2022 (arXiv 2205.05198, section 4), with grouped key/value heads, gated
activations, RMSNorm and rotary positions added, attention without stored scores, and a loss that keeps gradients in
place of logits. A term is a storage, not a tensor: queries, keys and values are views of one product, so that any of
them keeps all of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from megazero.config import Config
from megazero.models import registry
from megazero.models.config import ModelConfig
from megazero.models.parts import attention_parts, mlp_parts
from megazero.planner.model_state import BYTES
from megazero.zero.offload.link import LEAVING


@dataclass(frozen=True)
class Kernels:
    """What decides, besides the model, which results are kept: the device, the dtype and the compiler.

    ``precision``: of activations, auto resolved.
    """

    precision: str
    gpu: bool
    compiled: bool

    @property
    def element(self) -> int:
        """Bytes of an activation."""
        return BYTES[self.precision]

    @property
    def fused_norm(self) -> bool:
        """Whether RMSNorm is one kernel; composed of several, each keeps its input in float32."""
        return self.gpu or self.compiled

    @property
    def statistic(self) -> int:
        """Bytes of a mean or of a reciprocal deviation in LayerNorm."""
        return 4 if self.gpu else self.element


def kernels(config: Config, gpu: bool) -> Kernels:
    """Those of a run on GPUs or on CPUs, with auto resolved as the engine does."""
    precision, compiled = config.train.precision, config.train.compile
    if precision == "auto":
        precision = "bf16" if gpu else "fp32"
    return Kernels(precision, gpu, gpu if compiled == "auto" else compiled)


@dataclass(frozen=True)
class Sizes:
    """A micro-batch in a layer on one rank.

    tokens: T, all of the micro-batch; outside: those a rank holds outside the tensor-parallel region; the rest are
    features or heads on this rank, ``qkv`` and ``inner`` the widths of the fused projections.
    """

    sequences: int
    seq_length: int
    outside: int
    tp: int
    hidden: int
    heads: int
    query: int
    key_value: int
    qkv: int
    inner: int
    ffn: int
    vocab: int

    @property
    def tokens(self) -> int:
        return self.sequences * self.seq_length

    @property
    def residual(self) -> int:
        """Elements of the residual stream."""
        return self.outside * self.hidden


def sizes(config: Config, model: ModelConfig) -> Sizes:
    """The sizes of ``config``'s micro-batches; the same on every rank."""
    tp, multiple = config.parallel.tp, config.parallel.vocab_multiple
    tokens = config.train.micro_batch_size * config.data.seq_length
    rows = -(-model.vocab_size // tp)
    local = {part.name: max(part.units // tp, 1) * part.unit_size for part in attention_parts(model)}
    return Sizes(
        sequences=config.train.micro_batch_size,
        seq_length=config.data.seq_length,
        outside=tokens // tp if config.sequence_parallel else tokens,
        tp=tp,
        hidden=model.hidden_size,
        heads=model.num_attention_heads // tp,
        query=local["q"],
        key_value=local["k"],
        qkv=sum(local.values()),
        inner=sum(part.size for part in mlp_parts(model)) // tp,
        ffn=model.ffn_size // tp,
        vocab=-(-rows // multiple) * multiple,
    )


def scores_are_stored(model: ModelConfig, kernel: Kernels, documents: bool) -> bool:
    """Whether attention runs as plain matrix products: torch's fused kernels lack the combination."""
    if kernel.gpu:
        grouped = model.kv_heads != model.num_attention_heads
        return grouped and (kernel.element == 4 or documents or model.sliding_window is not None)
    return model.attention_dropout_rate > 0


def norm_bytes(model: ModelConfig, kernel: Kernels, rows: int, features: int) -> int:
    """What a norm over ``features`` keeps of ``rows``, its input and its output apart."""
    if model.norm == "layernorm":
        return 2 * rows * kernel.statistic
    return rms_norm_bytes(kernel, rows, features)


def rms_norm_bytes(kernel: Kernels, rows: int, features: int) -> int:
    """As ``norm_bytes``, for RMSNorm. Composed, it keeps x / rms and, of 16-bit input, a copy in float32."""
    if kernel.fused_norm:
        return 4 * rows
    return 4 * rows + 4 * rows * features * (1 if kernel.element == 4 else 2)


def keeps_residual(model: ModelConfig, kernel: Kernels) -> bool:
    """Whether norms keep their input itself, not a float32 copy of it."""
    return model.norm == "layernorm" or kernel.fused_norm or kernel.element == 4


def layer_bytes(
    model: ModelConfig, size: Sizes, kernel: Kernels, recompute: str = "none", documents: bool = False
) -> int:
    """What one layer keeps of a micro-batch, its input apart and its output counted.

    ``recompute``: as train.recompute. ``documents``: whether attention is confined by data.reset_at_document.
    """
    if recompute == "full":
        return size.residual * kernel.element
    if recompute == "selective":
        return _selective(model, size, kernel, documents)
    attention = _attention(model, size, kernel, documents)
    norms = 2 * norm_bytes(model, kernel, size.outside, size.hidden)
    normalised = 2 * size.tokens * size.hidden * kernel.element  # as gathered over the sequence
    residuals = 2 * size.residual * kernel.element if keeps_residual(model, kernel) else 0
    masks = 2 * size.residual if model.dropout > 0 else 0
    return norms + normalised + attention + _mlp(model, size, kernel) + masks + residuals


def _attention(model: ModelConfig, size: Sizes, kernel: Kernels, documents: bool) -> int:
    """From the projections' output to the output projection's input."""
    tokens, turned = size.tokens, size.query + size.key_value
    kept = 0
    if model.qk_norm:
        rows = tokens * (turned // model.head_size)
        kept += rms_norm_bytes(kernel, rows, model.head_size)
    if scores_are_stored(model, kernel, documents):
        # Queries, keys and values in float32, heads repeated; the softmax, and its dropped-out copy with the mask.
        scores = size.sequences * size.heads * size.seq_length**2
        per_score = 4 if model.attention_dropout_rate == 0 else 9 if kernel.gpu else 12
        return kept + tokens * size.query * (3 * 4 + kernel.element) + scores * per_score
    kept += tokens * size.qkv * kernel.element
    if model.position == "rotary" or model.qk_norm:
        kept += tokens * turned * kernel.element
    kept += tokens * size.query * kernel.element + tokens * size.heads * 4  # the output, and log Σ exp
    return kept + _mask(model, size, kernel, documents)


def _mask(model: ModelConfig, size: Sizes, kernel: Kernels, documents: bool) -> int:
    """The boolean mask as the attention kernel wants it: numbers to add, made anew in every layer."""
    if documents:
        return size.sequences * size.seq_length**2 * kernel.element
    windowed = model.sliding_window is not None and model.sliding_window < size.seq_length
    return size.seq_length**2 * kernel.element if windowed else 0


def _mlp(model: ModelConfig, size: Sizes, kernel: Kernels) -> int:
    """The activation's input and output. Of relu the output tells all; a gate's own activation is kept in eager."""
    if model.activation == "relu":
        return size.tokens * size.ffn * kernel.element
    gate = size.ffn if registry.is_gated(model.activation) and not kernel.compiled else 0
    return size.tokens * (size.inner + size.ffn + gate) * kernel.element


def _selective(model: ModelConfig, size: Sizes, kernel: Kernels, documents: bool) -> int:
    """Results of matrix products, of attention and of collectives (build.apply_recompute)."""
    tokens, element = size.tokens, kernel.element
    kept = tokens * (size.qkv + size.inner) * element
    if scores_are_stored(model, kernel, documents):
        kept += 4 * (size.sequences * size.heads * size.seq_length**2 + tokens * size.query)
    else:
        kept += tokens * size.query * element + tokens * size.heads * 4
    # Both projections back to the residual stream; the compiler drops what backward does not read.
    if size.tp == 1:
        kept += tokens * size.hidden * element * (1 if kernel.compiled else 2)
    elif kernel.compiled:
        kept += 4 * size.residual
    else:
        kept += 2 * 4 * (tokens * size.hidden + size.residual)
    if size.outside < tokens:
        kept += 2 * tokens * size.hidden * element
    return kept + size.residual * element


def deferred_bytes(size: Sizes, kernel: Kernels) -> int:
    """What one layer keeps of a micro-batch from the first part of its backward to the second, where it has two: what
    its four matrices multiply, and the gradients of the products."""
    products = 4 * size.hidden + size.qkv + size.query + size.inner + size.ffn
    return size.tokens * products * kernel.element


def loss_kept_bytes(size: Sizes, kernel: Kernels) -> int:
    """What the loss keeps for backward: the gradients of its hidden states and of its weight, in place of logits."""
    return (size.residual + size.vocab * size.hidden) * kernel.element


def stage_activation_bytes(
    config: Config, model: ModelConfig, kernel: Kernels, layers: int, first: bool, last: bool
) -> int:
    """What a pipeline stage of ``layers`` layers keeps of one micro-batch, its input and output included."""
    size, documents, recompute = sizes(config, model), config.data.reset_at_document, config.train.recompute
    stream = size.residual * kernel.element
    kept = layers * layer_bytes(model, size, kernel, recompute, documents)
    if config.train.offload_activations:
        # Some on their way out (zero.offload.link), two on their way back.
        kept = min(layers, LEAVING + 2) * stream
    if recompute != "none" or keeps_residual(model, kernel):
        kept += stream
    else:  # only what the pipeline itself holds on to
        kept += stream * ((not first) + (not last))
    if first:
        kept += 8 * size.tokens  # token ids
        kept += 8 * size.outside if model.position == "learned" else 0
        kept += size.residual if model.dropout > 0 else 0
    if documents and model.position == "rotary":
        kept += 2 * 4 * size.tokens * model.head_size
    if documents and recompute != "none":
        kept += size.sequences * size.seq_length**2
    if last:
        kept += norm_bytes(model, kernel, size.outside, size.hidden) + loss_kept_bytes(size, kernel)
    return kept

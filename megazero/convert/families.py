"""Which tensor of a Hugging Face model each of our global tensors is. One row per tensor, no code per family."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megazero.errors import ConvertError
from megazero.models.config import ModelConfig
from megazero.models.parameters import Shapes, parameter_shapes

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Source:
    """Where a global tensor is inside a Hugging Face tensor.

    ``transposed``: stored (in, out). ``part`` of ``parts``: equal runs of the output dimension.
    """

    name: str
    transposed: bool = False
    part: int = 0
    parts: int = 1

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of the whole Hugging Face tensor, given the global tensor's."""
        full = (shape[0] * self.parts, *shape[1:])
        return full[::-1] if self.transposed else full


@dataclass(frozen=True)
class _Row:
    """A module's place; ``{i}`` is the layer. ``conv1d``: the weight is transposed, as GPT-2's are."""

    module: str
    conv1d: bool = False
    part: int = 0
    parts: int = 1


_GPT2_ROWS = {
    "embedding.word": _Row("wte"),
    "embedding.position": _Row("wpe"),
    "attention_norm": _Row("h.{i}.ln_1"),
    "attention.q": _Row("h.{i}.attn.c_attn", conv1d=True, part=0, parts=3),
    "attention.k": _Row("h.{i}.attn.c_attn", conv1d=True, part=1, parts=3),
    "attention.v": _Row("h.{i}.attn.c_attn", conv1d=True, part=2, parts=3),
    "attention.out": _Row("h.{i}.attn.c_proj", conv1d=True),
    "mlp_norm": _Row("h.{i}.ln_2"),
    "mlp.up": _Row("h.{i}.mlp.c_fc", conv1d=True),
    "mlp.down": _Row("h.{i}.mlp.c_proj", conv1d=True),
    "final_norm": _Row("ln_f"),
}

_LLAMA_ROWS = {
    "embedding.word": _Row("embed_tokens"),
    "attention_norm": _Row("layers.{i}.input_layernorm"),
    "attention.q": _Row("layers.{i}.self_attn.q_proj"),
    "attention.k": _Row("layers.{i}.self_attn.k_proj"),
    "attention.v": _Row("layers.{i}.self_attn.v_proj"),
    "attention.q_norm": _Row("layers.{i}.self_attn.q_norm"),
    "attention.k_norm": _Row("layers.{i}.self_attn.k_norm"),
    "attention.out": _Row("layers.{i}.self_attn.o_proj"),
    "mlp_norm": _Row("layers.{i}.post_attention_layernorm"),
    "mlp.gate": _Row("layers.{i}.mlp.gate_proj"),
    "mlp.up": _Row("layers.{i}.mlp.up_proj"),
    "mlp.down": _Row("layers.{i}.mlp.down_proj"),
    "final_norm": _Row("norm"),
}

HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Family:
    """``prefix`` stands before every tensor but the head's; files of the bare model lack it.

    ``buffers``: what such files may hold besides parameters, as a pattern of the name without the prefix.
    """

    model_type: str
    architecture: str
    prefix: str
    rows: dict[str, _Row]
    buffers: re.Pattern[str]

    def source(self, name: str) -> Source:
        """Of a global tensor; the prefix is there."""
        if name == "head.weight":
            return Source(HEAD)
        layer = _LAYER.fullmatch(name)
        stem, _, kind = (layer[2] if layer else name).rpartition(".")
        row = self.rows[stem]
        module = row.module.format(i=layer[1]) if layer else row.module
        transposed = row.conv1d and kind == "weight"
        return Source(f"{self.prefix}{module}.{kind}", transposed, row.part, row.parts)

    def tensors(self, config: ModelConfig) -> dict[str, list[tuple[str, Source, tuple[int, ...]]]]:
        """Hugging Face name → the (global name, source, global shape) that make it up, by part; in our order."""
        found: dict[str, list[tuple[str, Source, tuple[int, ...]]]] = {}
        shapes: Shapes = parameter_shapes(config)
        for name, shape in shapes.items():
            source = self.source(name)
            found.setdefault(source.name, []).append((name, source, shape))
        return found


def _llama_like(model_type: str, architecture: str) -> Family:
    buffers = re.compile(r"(layers\.\d+\.self_attn\.)?rotary_emb\.\w+")
    return Family(model_type, architecture, "model.", _LLAMA_ROWS, buffers)


FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family("gpt2", "GPT2LMHeadModel", "transformer.", _GPT2_ROWS, re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")),
        _llama_like("llama", "LlamaForCausalLM"),
        _llama_like("mistral", "MistralForCausalLM"),
        _llama_like("qwen2", "Qwen2ForCausalLM"),
        _llama_like("qwen3", "Qwen3ForCausalLM"),
    )
}


def family_of(model_type: object, where: str) -> Family:
    """The family of a config.json's ``model_type``; ConvertError for one that is not here."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConvertError(f"{where}: model_type {model_type!r} is not supported; choose one of {', '.join(FAMILIES)}")
    return FAMILIES[model_type]

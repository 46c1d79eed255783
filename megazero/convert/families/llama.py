"""Llama 2, 3, 3.1 and 3.2, and what the families that descend from it have in common."""

from __future__ import annotations

import re
from typing import Any

from megazero.convert.families.base import Family, Json, Row
from megazero.convert.families.rope import read_rope, write_rope
from megazero.errors import ConvertError
from megazero.models.config import ModelConfig


class LlamaLike(Family):
    """RMSNorm, rotary positions, SwiGLU, grouped queries. Biases, norms of heads and windows are the subclasses'."""

    rows = {
        "embedding.word": Row("embed_tokens"),
        "attention_norm": Row("layers.{i}.input_layernorm"),
        "attention.q": Row("layers.{i}.self_attn.q_proj"),
        "attention.k": Row("layers.{i}.self_attn.k_proj"),
        "attention.v": Row("layers.{i}.self_attn.v_proj"),
        "attention.q_norm": Row("layers.{i}.self_attn.q_norm"),
        "attention.k_norm": Row("layers.{i}.self_attn.k_norm"),
        "attention.out": Row("layers.{i}.self_attn.o_proj"),
        "mlp_norm": Row("layers.{i}.post_attention_layernorm"),
        "mlp.gate": Row("layers.{i}.mlp.gate_proj"),
        "mlp.up": Row("layers.{i}.mlp.up_proj"),
        "mlp.down": Row("layers.{i}.mlp.down_proj"),
        "final_norm": Row("norm"),
    }
    buffers = re.compile(r"(layers\.\d+\.self_attn\.)?rotary_emb\.\w+")
    fields = {
        "num_hidden_layers": "num_layers",
        "hidden_size": "hidden_size",
        "num_attention_heads": "num_attention_heads",
        "num_key_value_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "intermediate_size": "ffn_hidden_size",
        "vocab_size": "vocab_size",
        "max_position_embeddings": "max_position_embeddings",
        "rms_norm_eps": "norm_eps",
        "initializer_range": "init_std",
        "tie_word_embeddings": "tie_word_embeddings",
    }
    defaults = {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "head_dim": None,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "sliding_window": None,
    }
    requires = {"norm": "rmsnorm", "position": "rotary", "activation": "swiglu"}

    def read(self, values: Json, where: str) -> dict[str, Any]:
        if values["hidden_act"] not in ("silu", "swish"):
            raise ConvertError(f"{where}: hidden_act = {values['hidden_act']!r} is not supported, only 'silu' is")
        theta, scaling = read_rope(values, where)
        return dict(
            norm="rmsnorm",
            position="rotary",
            activation="swiglu",
            rope_theta=theta,
            rope_scaling=scaling,
            qkv_bias=False,
            out_bias=False,
            mlp_bias=False,
            attention_dropout=values["attention_dropout"] or None,
        )

    def write(self, config: ModelConfig) -> dict[str, Any]:
        return {
            "num_key_value_heads": config.kv_heads,
            "head_dim": config.head_size,
            "intermediate_size": config.ffn_size,
            "hidden_act": "silu",
            "attention_dropout": config.attention_dropout_rate,
            **write_rope(config),
        }


def window_of_types(values: Json, where: str) -> int | None:
    """The sliding window, where ``layer_types`` says of each layer whether its attention slides. ConvertError where
    some slide and some do not."""
    kinds, layers = values["layer_types"], values["num_hidden_layers"]
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise ConvertError(f"{where}: layer_types = {kinds!r} must name one of {', '.join(known)} for each layer")
    if len(set(kinds)) > 1:
        raise ConvertError(
            f"{where}: sliding attention in layer {kinds.index('sliding_attention')} but not in all (layer_types) is "
            "not supported; only all layers or none"
        )
    return values["sliding_window"] if kinds[0] == "sliding_attention" else None


class Llama(LlamaLike):
    model_type = "llama"
    architecture = "LlamaForCausalLM"
    defaults = LlamaLike.defaults | {
        "intermediate_size": 11008,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
    }
    requires = LlamaLike.requires | {"qk_norm": False, "sliding_window": None}

    def read(self, values: Json, where: str) -> dict[str, Any]:
        bias = bool(values["attention_bias"])
        own = {"qkv_bias": bias, "out_bias": bias, "mlp_bias": bool(values["mlp_bias"])}
        return super().read(values, where) | own

    def write(self, config: ModelConfig) -> dict[str, Any]:
        return super().write(config) | {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}

    def completed(self, config: ModelConfig) -> ModelConfig:
        attention = config.qkv_bias or config.out_bias
        return config.model_copy(update={"qkv_bias": attention, "out_bias": attention})

    def refusals(self, config: ModelConfig) -> list[str]:
        found, heads = super().refusals(config), config.num_attention_heads
        if config.hidden_size % heads:
            found.append(f"hidden_size = {config.hidden_size} (it has a multiple of num_attention_heads, {heads})")
        return found


FAMILY = Llama()

"""Mistral: a Llama without biases whose attention may slide, in all layers (v0.1) or none (v0.2 and later)."""

from __future__ import annotations

from typing import Any

from megazero.convert.families.base import Json
from megazero.convert.families.llama import LlamaLike, window_of_types
from megazero.models.config import ModelConfig


class Mistral(LlamaLike):
    model_type = "mistral"
    architecture = "MistralForCausalLM"
    defaults = LlamaLike.defaults | {
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 32000,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    }
    requires = LlamaLike.requires | {"qk_norm": False, "qkv_bias": False, "out_bias": False, "mlp_bias": False}

    def read(self, values: Json, where: str) -> dict[str, Any]:
        typed = values.get("layer_types") is not None
        window = window_of_types(values, where) if typed else values["sliding_window"]
        return super().read(values, where) | {"sliding_window": window}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        return super().write(config) | {"sliding_window": config.sliding_window}


FAMILY = Mistral()

"""Qwen-3: norms over each head's queries and keys, and a head_dim apart from hidden_size / heads."""

from __future__ import annotations

from typing import Any

from megazero.convert.families.base import Json
from megazero.convert.families.qwen2 import QwenLike
from megazero.models.config import ModelConfig


class Qwen3(QwenLike):
    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    defaults = QwenLike.defaults | {"head_dim": 128}
    requires = QwenLike.requires | {"qk_norm": True, "mlp_bias": False}

    def read(self, values: Json, where: str) -> dict[str, Any]:
        bias = bool(values["attention_bias"])
        return super().read(values, where) | {"qkv_bias": bias, "out_bias": bias, "qk_norm": True}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        return super().write(config) | {"attention_bias": config.qkv_bias}

    def completed(self, config: ModelConfig) -> ModelConfig:
        attention = config.qkv_bias or config.out_bias
        return config.model_copy(update={"qkv_bias": attention, "out_bias": attention})


FAMILY = Qwen3()

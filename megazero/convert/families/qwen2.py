"""Qwen-2 and 2.5: a Llama with biases on q, k and v alone, whose attention may slide."""

from __future__ import annotations

from typing import Any

from megazero.convert.families.base import Json
from megazero.convert.families.llama import LlamaLike, window_of_types
from megazero.errors import ConvertError
from megazero.models.config import ModelConfig


class QwenLike(LlamaLike):
    """What Qwen-2 and Qwen-3 share: how a window is spelled."""

    defaults = LlamaLike.defaults | {
        "num_key_value_heads": 32,
        "intermediate_size": 22016,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    }

    def read(self, values: Json, where: str) -> dict[str, Any]:
        return super().read(values, where) | {"sliding_window": _read_window(values, where)}

    def write(self, config: ModelConfig) -> dict[str, Any]:
        slides = config.sliding_window is not None
        return super().write(config) | {
            "use_sliding_window": slides,
            "sliding_window": config.sliding_window,
            "max_window_layers": 0 if slides else config.num_layers,
        }


def _read_window(values: Json, where: str) -> int | None:
    window = values["sliding_window"]
    if not values["use_sliding_window"] or window is None:
        return None
    if values.get("layer_types") is not None:
        return window_of_types(values, where)
    layers, first = values["num_hidden_layers"], values["max_window_layers"]
    if not isinstance(layers, int) or not isinstance(first, int):
        raise ConvertError(f"{where}: max_window_layers = {first!r} of num_hidden_layers = {layers!r}: no numbers")
    if 0 < first < layers:
        raise ConvertError(
            f"{where}: sliding attention in layers {first} and later but not in all (max_window_layers) is not "
            "supported; only all layers or none"
        )
    return window if first < layers else None


class Qwen2(QwenLike):
    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"
    requires = QwenLike.requires | {"qk_norm": False, "out_bias": False, "mlp_bias": False}

    def read(self, values: Json, where: str) -> dict[str, Any]:
        return super().read(values, where) | {"qkv_bias": True}

    def completed(self, config: ModelConfig) -> ModelConfig:
        return config.model_copy(update={"qkv_bias": True})


FAMILY = Qwen2()

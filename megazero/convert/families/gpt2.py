"""GPT-2: LayerNorm, learned positions, biases everywhere, q, k and v in one transposed matrix."""

from __future__ import annotations

import re
from typing import Any

from megazero.convert.families.base import Family, Json, Row, refuse
from megazero.errors import ConvertError
from megazero.models.config import ModelConfig

_ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
_ACTIVATIONS_OUT = {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu", "silu": "silu"}


class GPT2(Family):
    model_type = "gpt2"
    architecture = "GPT2LMHeadModel"
    prefix = "transformer."
    rows = {
        "embedding.word": Row("wte"),
        "embedding.position": Row("wpe"),
        "attention_norm": Row("h.{i}.ln_1"),
        "attention.q": Row("h.{i}.attn.c_attn", conv1d=True, part=0, parts=3),
        "attention.k": Row("h.{i}.attn.c_attn", conv1d=True, part=1, parts=3),
        "attention.v": Row("h.{i}.attn.c_attn", conv1d=True, part=2, parts=3),
        "attention.out": Row("h.{i}.attn.c_proj", conv1d=True),
        "mlp_norm": Row("h.{i}.ln_2"),
        "mlp.up": Row("h.{i}.mlp.c_fc", conv1d=True),
        "mlp.down": Row("h.{i}.mlp.c_proj", conv1d=True),
        "final_norm": Row("ln_f"),
    }
    # The causal mask and the number that masks.
    buffers = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
    fields = {
        "n_layer": "num_layers",
        "n_embd": "hidden_size",
        "n_head": "num_attention_heads",
        "n_inner": "ffn_hidden_size",
        "vocab_size": "vocab_size",
        "n_positions": "max_position_embeddings",
        "layer_norm_epsilon": "norm_eps",
        "initializer_range": "init_std",
        "tie_word_embeddings": "tie_word_embeddings",
    }
    aliases = {
        "num_hidden_layers": "n_layer",
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    }
    defaults = {
        "n_layer": 12,
        "n_embd": 768,
        "n_head": 12,
        "n_inner": None,
        "vocab_size": 50257,
        "n_positions": 1024,
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "activation_function": "gelu_new",
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    }
    requires = {"norm": "layernorm", "position": "learned", "qk_norm": False, "sliding_window": None}

    def read(self, values: Json, where: str) -> dict[str, Any]:
        refuse(
            values,
            where,
            {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
        )
        activation = values["activation_function"]
        if not isinstance(activation, str) or activation not in _ACTIVATIONS:
            raise ConvertError(
                f"{where}: activation_function = {activation!r} is not supported; "
                f"choose one of {', '.join(_ACTIVATIONS)}"
            )
        dropout, attention_dropout = values["resid_pdrop"], values["attn_pdrop"]
        if values["embd_pdrop"] != dropout:
            raise ConvertError(
                f"{where}: embd_pdrop = {values['embd_pdrop']} differs from resid_pdrop = {dropout}, which is not "
                "supported; dropout changes no weight, so set both to the same value there"
            )
        return dict(
            norm="layernorm",
            position="learned",
            activation=_ACTIVATIONS[activation],
            dropout=dropout,
            attention_dropout=None if attention_dropout == dropout else attention_dropout,
        )

    def write(self, config: ModelConfig) -> dict[str, Any]:
        return {
            "n_inner": config.ffn_size,
            "activation_function": _ACTIVATIONS_OUT[config.activation],
            "resid_pdrop": config.dropout,
            "embd_pdrop": config.dropout,
            "attn_pdrop": config.attention_dropout_rate,
        }

    def completed(self, config: ModelConfig) -> ModelConfig:
        return config.model_copy(update={"qkv_bias": True, "out_bias": True, "mlp_bias": True})

    def refusals(self, config: ModelConfig) -> list[str]:
        found, heads = super().refusals(config), config.num_attention_heads
        if config.activation not in _ACTIVATIONS_OUT:
            found.append(f"activation = {config.activation!r} (it has {', '.join(_ACTIVATIONS_OUT)})")
        if config.kv_heads != heads:
            found.append(f"num_key_value_heads = {config.kv_heads} (it has as many as num_attention_heads, {heads})")
        if config.head_size * heads != config.hidden_size:
            found.append(f"head_dim = {config.head_size} (it has hidden_size / num_attention_heads)")
        return found


FAMILY = GPT2()

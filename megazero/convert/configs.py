"""A Hugging Face config.json ↔ ModelConfig, both ways, for every family in families.py.

Reads what transformers 4 and 5 write: ``rope_parameters`` or ``rope_theta`` with ``rope_scaling``. A field that
a file leaves out has the default that transformers gives it. What ModelConfig cannot express is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pydantic

from megazero.convert.families import FAMILIES, Family, family_of
from megazero.errors import ConvertError
from megazero.models.config import ModelConfig, RopeScaling

Json = Mapping[str, Any]

_GPT2_FIELDS = {
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
_LLAMA_FIELDS = {
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
_FIELDS = {name: _GPT2_FIELDS if name == "gpt2" else _LLAMA_FIELDS for name in FAMILIES}

# What transformers takes where config.json is silent.
_LLAMA_DEFAULTS: Json = {
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
_QWEN_DEFAULTS: Json = {
    "num_key_value_heads": 32,
    "intermediate_size": 22016,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_DEFAULTS: dict[str, Json] = {
    "gpt2": {
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
    },
    "llama": {
        **_LLAMA_DEFAULTS,
        "intermediate_size": 11008,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
    },
    "mistral": {
        **_LLAMA_DEFAULTS,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 32000,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": {**_LLAMA_DEFAULTS, **_QWEN_DEFAULTS},
    "qwen3": {**_LLAMA_DEFAULTS, **_QWEN_DEFAULTS, "head_dim": 128},
}

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


def read_config(raw: Json, where: str) -> tuple[Family, ModelConfig]:
    """The family and architecture of a parsed config.json. ``where`` names the file in errors (ConvertError)."""
    family = family_of(raw.get("model_type"), where)
    if raw.get("quantization_config"):
        raise ConvertError(f"{where}: quantization_config: quantised weights are not supported; use the original model")
    values = {**_DEFAULTS[family.model_type], **raw}
    fields = {ours: values[theirs] for theirs, ours in _FIELDS[family.model_type].items()}
    specific = _read_gpt2(values, where) if family.model_type == "gpt2" else _read_llama(family, values, where)
    try:
        config = ModelConfig(**fields, **specific)
    except pydantic.ValidationError as error:
        problem = error.errors()[0]
        names = {ours: theirs for theirs, ours in _FIELDS[family.model_type].items()}
        field = str(problem["loc"][0]) if problem["loc"] else "?"
        raise ConvertError(f"{where}: {names.get(field, field)}: {problem['msg']}, got {problem['input']!r}") from None
    # Sizes that the file left to follow from others are spelled out, so that equal models have equal configs.
    sizes = {"num_key_value_heads": config.kv_heads, "head_dim": config.head_size, "ffn_hidden_size": config.ffn_size}
    return family, config.model_copy(update=sizes)


def _refuse(values: Json, where: str, required: Json) -> None:
    for field, value in required.items():
        if values[field] != value:
            raise ConvertError(f"{where}: {field} = {values[field]!r} is not supported, only {value!r} is")


def _activation(values: Json, field: str, where: str) -> str:
    name = values[field]
    if name not in _ACTIVATIONS:
        raise ConvertError(f"{where}: {field} = {name!r} is not supported; choose one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _read_gpt2(values: Json, where: str) -> dict[str, Any]:
    plain = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
    _refuse(values, where, plain)
    dropout, attention_dropout = values["resid_pdrop"], values["attn_pdrop"]
    if values["embd_pdrop"] != dropout:
        raise ConvertError(
            f"{where}: embd_pdrop = {values['embd_pdrop']} differs from resid_pdrop = {dropout}, which is not "
            "supported; dropout changes no weight, so set both to the same value there"
        )
    return dict(
        norm="layernorm",
        position="learned",
        activation=_activation(values, "activation_function", where),
        dropout=dropout,
        attention_dropout=None if attention_dropout == dropout else attention_dropout,
    )


def _read_llama(family: Family, values: Json, where: str) -> dict[str, Any]:
    if _activation(values, "hidden_act", where) != "silu":
        raise ConvertError(f"{where}: hidden_act = {values['hidden_act']!r} is not supported, only 'silu' is")
    theta, scaling = _read_rope(values, where)
    return dict(
        norm="rmsnorm",
        position="rotary",
        activation="swiglu",
        rope_theta=theta,
        rope_scaling=scaling,
        # Qwen-2 has them always, and on no other projection; Mistral's files cannot ask for any.
        qkv_bias=family.model_type == "qwen2" or (family.model_type != "mistral" and bool(values["attention_bias"])),
        out_bias=family.model_type in ("llama", "qwen3") and bool(values["attention_bias"]),
        mlp_bias=family.model_type == "llama" and bool(values["mlp_bias"]),
        qk_norm=family.model_type == "qwen3",
        sliding_window=_read_window(family, values, where),
        attention_dropout=values["attention_dropout"] or None,
    )


def _read_window(family: Family, values: Json, where: str) -> int | None:
    if family.model_type == "llama":
        return None
    window = values["sliding_window"]
    if family.model_type == "mistral":
        slides = [window is not None]
    else:
        layers = int(values["num_hidden_layers"])
        types = values.get("layer_types") or [
            "sliding_attention" if i >= values["max_window_layers"] else "full_attention" for i in range(layers)
        ]
        on = bool(values["use_sliding_window"]) and window is not None
        slides = [on and kind == "sliding_attention" for kind in types]
    if any(slides) and not all(slides):
        raise ConvertError(
            f"{where}: sliding attention in layers {slides.index(True)} and later but not in all (max_window_layers, "
            "layer_types) is not supported; only all layers or none"
        )
    return window if any(slides) else None


def _read_rope(values: Json, where: str) -> tuple[float, RopeScaling | None]:
    rope: dict[str, Any] = dict(values.get("rope_scaling") or values.get("rope_parameters") or {})
    theta = rope.get("rope_theta") or values.get("rope_theta") or 10000.0
    partial = rope.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ConvertError(f"{where}: partial_rotary_factor = {partial} is not supported, only 1 is")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return float(theta), None
    if kind not in ("linear", "llama3", "yarn"):
        raise ConvertError(f"{where}: rope_type {kind!r} is not supported; choose one of default, linear, llama3, yarn")
    longest = values["max_position_embeddings"]
    original = values.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings") or longest
    factor = rope.get("factor") or (longest / original if kind == "yarn" else None)
    fields: dict[str, Any] = {"type": kind, "factor": factor}
    if kind != "linear":
        fields["original_max_position_embeddings"] = original
    if kind == "llama3":
        fields["low_freq_factor"], fields["high_freq_factor"] = (
            rope.get("low_freq_factor"),
            rope.get("high_freq_factor"),
        )
    if kind == "yarn":
        if rope.get("truncate", True) is not True:
            raise ConvertError(f"{where}: truncate = {rope['truncate']!r} in the rope settings is not supported")
        fields["beta_fast"], fields["beta_slow"] = rope.get("beta_fast") or 32.0, rope.get("beta_slow") or 1.0
        fields["attention_factor"] = _yarn_attention_factor(rope, factor)
    missing = [name for name, value in fields.items() if value is None and name != "attention_factor"]
    if missing:
        raise ConvertError(f"{where}: rope_type {kind!r} needs {', '.join(missing)}")
    try:
        return float(theta), RopeScaling(**fields)
    except pydantic.ValidationError as error:
        problem = error.errors()[0]
        raise ConvertError(f"{where}: rope settings: {problem['loc'][0]}: {problem['msg']}") from None


def _yarn_attention_factor(rope: Json, factor: float) -> float | None:
    """As DeepSeek's files give it: a ratio of two amplitudes 0.1 m ln(factor) + 1 (mscale, mscale_all_dim)."""
    if rope.get("attention_factor") is not None:
        return rope["attention_factor"]
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        if factor <= 1:
            return 1.0
        above, below = (0.1 * rope[key] * math.log(factor) + 1.0 for key in ("mscale", "mscale_all_dim"))
        return above / below
    return None


# What a config must be to be one of the family.
_GPT2_REQUIRES: Json = {"norm": "layernorm", "position": "learned", "qk_norm": False, "sliding_window": None}
_LLAMA_REQUIRES: Json = {"norm": "rmsnorm", "position": "rotary", "activation": "swiglu"}
_REQUIRES: dict[str, Json] = {
    "gpt2": _GPT2_REQUIRES,
    "llama": {**_LLAMA_REQUIRES, "qk_norm": False, "sliding_window": None},
    "mistral": {**_LLAMA_REQUIRES, "qk_norm": False, "qkv_bias": False, "out_bias": False, "mlp_bias": False},
    "qwen2": {**_LLAMA_REQUIRES, "qk_norm": False, "out_bias": False, "mlp_bias": False},
    "qwen3": {**_LLAMA_REQUIRES, "qk_norm": True, "mlp_bias": False},
}


def _refusals(model_type: str, config: ModelConfig) -> list[str]:
    """What of a config the family cannot express."""
    found = [
        f"{field} = {getattr(config, field)!r} (it has {value!r})"
        for field, value in {**_REQUIRES[model_type], "attention": "softmax"}.items()
        if getattr(config, field) != value
    ]
    heads, hidden = config.num_attention_heads, config.hidden_size
    if model_type == "gpt2":
        if config.activation not in _ACTIVATIONS_OUT:
            found.append(f"activation = {config.activation!r} (it has {', '.join(_ACTIVATIONS_OUT)})")
        if config.kv_heads != heads:
            found.append(f"num_key_value_heads = {config.kv_heads} (it has as many as num_attention_heads, {heads})")
        if config.head_size * heads != hidden:
            found.append(f"head_dim = {config.head_size} (it has hidden_size / num_attention_heads)")
    elif model_type == "llama" and hidden % heads:
        found.append(f"hidden_size = {hidden} (it has a multiple of num_attention_heads, {heads})")
    return found


def _with_biases(model_type: str, config: ModelConfig) -> ModelConfig:
    """The config with every bias that the family has where it has any: zeros say the same as none."""
    if model_type == "gpt2":
        return config.model_copy(update={"qkv_bias": True, "out_bias": True, "mlp_bias": True})
    if model_type == "qwen2":
        return config.model_copy(update={"qkv_bias": True})
    attention = config.qkv_bias or config.out_bias
    return config.model_copy(update={"qkv_bias": attention, "out_bias": attention})


def choose_family(config: ModelConfig) -> tuple[Family, ModelConfig]:
    """The family that a model can be exported as, and its config there, which may have biases (zeros) more.

    A family that has exactly the model's parameters goes before one that needs zeros. Raises ConvertError
    naming the fields in the way.
    """
    refusals = {name: _refusals(name, config) for name in FAMILIES}
    fitting = [(FAMILIES[name], _with_biases(name, config)) for name, found in refusals.items() if not found]
    for family, full in fitting:
        if full == config:
            return family, full
    if fitting:
        return fitting[0]
    nearest = min(refusals, key=lambda name: len(refusals[name]))
    raise ConvertError(
        f"this model is of no Hugging Face family that megazero writes; the nearest is {nearest}, "
        f"which has no place for {'; '.join('model.' + problem for problem in refusals[nearest])}"
    )


def write_config(family: Family, config: ModelConfig, dtype: str, end_of_text: int | None) -> dict[str, Any]:
    """The config.json of a model exported as that family, for transformers 4 and 5."""
    values: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "dtype": dtype,
        "torch_dtype": dtype,
        # Written out because the family's defaults are tokens of another vocabulary.
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "pad_token_id": None,
        "use_cache": True,
    }
    values.update({theirs: getattr(config, ours) for theirs, ours in _FIELDS[family.model_type].items()})
    if family.model_type == "gpt2":
        return values | {
            "n_inner": config.ffn_size,
            "activation_function": _ACTIVATIONS_OUT[config.activation],
            "resid_pdrop": config.dropout,
            "embd_pdrop": config.dropout,
            "attn_pdrop": config.attention_dropout_rate,
        }
    values |= {
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "intermediate_size": config.ffn_size,
        "hidden_act": "silu",
        "attention_dropout": config.attention_dropout_rate,
        **_write_rope(config),
    }
    if family.model_type in ("llama", "qwen3"):
        values["attention_bias"] = config.qkv_bias
    if family.model_type == "llama":
        values["mlp_bias"] = config.mlp_bias
    if family.model_type == "mistral":
        values["sliding_window"] = config.sliding_window
    if family.model_type in ("qwen2", "qwen3"):
        values |= {
            "use_sliding_window": config.sliding_window is not None,
            "sliding_window": config.sliding_window,
            "max_window_layers": 0 if config.sliding_window is not None else config.num_layers,
        }
    return values


def _write_rope(config: ModelConfig) -> dict[str, Any]:
    scaling = config.rope_scaling
    if scaling is None:
        old, new = None, {"rope_type": "default"}
    else:
        new = {"rope_type": scaling.type, "factor": scaling.factor}
        if scaling.type != "linear":
            original = scaling.original_max_position_embeddings or config.max_position_embeddings
            new["original_max_position_embeddings"] = original
        if scaling.type == "llama3":
            new |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
        if scaling.type == "yarn":
            new |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
            if scaling.attention_factor is not None:
                new["attention_factor"] = scaling.attention_factor
        old = new
    return {
        "rope_theta": config.rope_theta,
        "rope_scaling": old,
        "rope_parameters": {**new, "rope_theta": config.rope_theta},
    }

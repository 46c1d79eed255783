"""The arguments that Megatron-LM saves with a checkpoint → ModelConfig. What ModelConfig lacks is refused by name."""

from __future__ import annotations

from typing import Any

import pydantic

from megazero.errors import ConvertError
from megazero.models.config import ModelConfig, RopeScaling

_OFF = (None, False, 0, [])
# Argument → the values that mean what a plain decoder does; older checkpoints lack most of them.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "num_experts": _OFF,
    "num_moe_experts": _OFF,
    "multi_latent_attention": _OFF,
    "mtp_num_layers": _OFF,
    "heterogeneous_layers_config_path": _OFF,
    "hybrid_override_pattern": _OFF,
    "is_hybrid_model": _OFF,
    "experimental_attention_variant": _OFF,
    "attention_output_gate": _OFF,
    "softmax_type": (None, "vanilla"),
    "softmax_scale": (None,),
    "qk_l2_norm": _OFF,
    "no_rope_freq": _OFF,
    "window_attn_skip_freq": _OFF,
    "apply_layernorm_1p": _OFF,
    "apply_residual_connection_post_layernorm": _OFF,
    "rotary_percent": (None, 1.0),
    "rotary_interleaved": _OFF,
    "squared_relu": _OFF,
    "quick_geglu": _OFF,
    "glu_linear_offset": _OFF,
    "activation_func_clamp_value": (None,),
    "retro_add_retriever": _OFF,
    "normalization": (None, "LayerNorm", "RMSNorm"),
    "position_embedding_type": (None, "learned_absolute", "rope"),
}
_SIZES = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings", "padded_vocab_size")
_REMEDY = "give the architecture as a Hugging Face config.json instead"


def read_args(args: Any, where: str, complete: bool = True) -> ModelConfig | None:
    """The architecture. ``args``: the saved namespace. Raises ConvertError, naming ``where`` and the argument.

    Not ``complete``: None where arguments are missing; what ModelConfig lacks is refused nevertheless.
    """
    values: dict[str, Any] = dict(vars(args))
    for name, allowed in _PLAIN.items():
        if values.get(name) not in allowed:
            choice = " or ".join(repr(value) for value in allowed if value is not None)
            instead = f"only {choice} is" if allowed is not _OFF and choice else "megazero has no such model"
            raise ConvertError(f"{where}: args.{name} = {values[name]!r} is not supported: {instead}")
    missing = [name for name in _SIZES if values.get(name) is None]
    if missing and not complete:
        return None
    if missing:
        raise ConvertError(f"{where}: args lacks {', '.join(missing)}; {_REMEDY}")
    if values.get("qk_layernorm") and values.get("normalization") != "RMSNorm":
        raise ConvertError(f"{where}: args.qk_layernorm with args.normalization 'LayerNorm' is not supported")
    try:
        config = ModelConfig(**_fields(values, where))
    except pydantic.ValidationError as error:
        problem = error.errors()[0]
        raise ConvertError(
            f"{where}: args: {problem['loc'][0]}: {problem['msg']}, got {problem['input']!r}; {_REMEDY}"
        ) from None
    sizes = {"num_key_value_heads": config.kv_heads, "head_dim": config.head_size, "ffn_hidden_size": config.ffn_size}
    return config.model_copy(update=sizes)


def _fields(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Of ModelConfig."""
    rotary = values.get("position_embedding_type") == "rope" or bool(values.get("use_rotary_position_embeddings"))
    rms, biased = values.get("normalization") == "RMSNorm", bool(values.get("add_bias_linear", True))
    eps = values.get("norm_epsilon", values.get("layernorm_epsilon"))
    dropout = values.get("hidden_dropout") or 0.0
    return {
        **{name: values[name] for name in _SIZES[:-1]},
        "vocab_size": values["padded_vocab_size"],
        "num_key_value_heads": values.get("num_query_groups") if values.get("group_query_attention") else None,
        "head_dim": values.get("kv_channels"),
        "ffn_hidden_size": values.get("ffn_hidden_size"),
        "norm": "rmsnorm" if rms else "layernorm",
        "norm_eps": 1e-5 if eps is None else eps,
        "activation": _activation(values, where),
        "position": "rotary" if rotary else "learned",
        "rope_theta": float(rotary and values.get("rotary_base") or 10000.0),
        "rope_scaling": _rope_scaling(values) if rotary else None,
        "qkv_bias": biased or bool(values.get("add_qkv_bias")),
        "out_bias": biased,
        "mlp_bias": biased,
        "qk_norm": bool(values.get("qk_layernorm")),
        # (left, right): a position sees that many before it.
        "sliding_window": values["window_size"][0] + 1 if values.get("window_size") else None,
        "tie_word_embeddings": not values.get("untie_embeddings_and_output_weights", False),
        "dropout": dropout,
        "attention_dropout": values.get("attention_dropout", dropout),
        "init_std": values.get("init_method_std") or 0.02,
    }


def _activation(values: dict[str, Any], where: str) -> str:
    if values.get("swiglu"):
        return "swiglu"
    if values.get("openai_gelu"):
        return "gelu_tanh"
    if values.get("bias_gelu_fusion") is None:
        raise ConvertError(
            f"{where}: args lacks bias_gelu_fusion, so which GELU the model has is unknown (the fused one is the "
            f"tanh approximation); {_REMEDY}"
        )
    return "gelu_tanh" if values["bias_gelu_fusion"] and values.get("add_bias_linear", True) else "gelu"


def _rope_scaling(values: dict[str, Any]) -> RopeScaling | None:
    if values.get("use_rope_scaling"):
        # Megatron's rule has Llama 3.1's numbers built in.
        factor = values.get("rope_scaling_factor") or 8.0
        return RopeScaling(type="llama3", factor=factor, original_max_position_embeddings=8192)
    factor = values.get("rotary_seq_len_interpolation_factor")
    return RopeScaling(type="linear", factor=factor) if factor not in (None, 1) else None

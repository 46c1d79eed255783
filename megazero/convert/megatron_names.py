"""Which rows of which Megatron tensor each of our global tensors is.

Megatron fuses q, k and v per group of heads, [q … q, k, v] for each query group, and the gate with the up projection
([all gates, all ups] in a distributed checkpoint; per tensor-parallel rank in a legacy one). Names are those of a
distributed checkpoint with the layer's number written in; ``canonical`` brings all others to them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megazero.models.config import ModelConfig

_MODULES = {
    "embedding.word.weight": "embedding.word_embeddings.weight",
    "embedding.position.weight": "embedding.position_embeddings.weight",
    "final_norm.": "decoder.final_layernorm.",
    "head.weight": "output_layer.weight",
}
_IN_LAYER = {
    "attention_norm.": "self_attention.linear_qkv.layer_norm_",
    "attention.q.": "self_attention.linear_qkv.",
    "attention.k.": "self_attention.linear_qkv.",
    "attention.v.": "self_attention.linear_qkv.",
    "attention.q_norm.": "self_attention.q_layernorm.",
    "attention.k_norm.": "self_attention.k_layernorm.",
    "attention.out.": "self_attention.linear_proj.",
    "mlp_norm.": "mlp.linear_fc1.layer_norm_",
    "mlp.gate.": "mlp.linear_fc1.",
    "mlp.up.": "mlp.linear_fc1.",
    "mlp.down.": "mlp.linear_fc2.",
}
_OURS = re.compile(r"(layers\.\d+\.)?(.+)")

# Older names, and those of layers whose norms are modules of their own; tried in order.
_ALIASES = [
    (re.compile(pattern), name)
    for pattern, name in (
        (r"^language_model\.(encoder|transformer)\.", "decoder."),
        (r"^language_model\.", ""),
        (r"^word_embeddings_for_head\.", "output_layer."),
        (r"^word_embeddings\.", "output_layer."),
        (r"\.attention\.", ".self_attention."),
        (r"\.query_key_value\.", ".linear_qkv."),
        (r"\.dense\.", ".linear_proj."),
        (r"\.dense_h_to_4h\.", ".linear_fc1."),
        (r"\.dense_4h_to_h\.", ".linear_fc2."),
        (r"(\.layers\.\d+|\.layers)\.input_(layer)?norm\.", r"\1.self_attention.linear_qkv.layer_norm_"),
        (r"\.(pre_mlp_layernorm|post_attention_layernorm|post_attention_norm)\.", ".mlp.linear_fc1.layer_norm_"),
        (r"^decoder\.final_norm\.", "decoder.final_layernorm."),
    )
]
_NO_PARAMETER = re.compile(r"_extra_state|rotary_pos_emb|inv_freq")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")

COLUMN_CUT = re.compile(r".*(word_embeddings|output_layer|linear_qkv|linear_fc1)\.(weight|bias)")
"""Cut along the output dimension by tensor parallelism."""
ROW_CUT = re.compile(r".*(linear_proj|linear_fc2)\.weight")
"""Cut along the input dimension."""


def canonical(name: str) -> str | None:
    """The name as a distributed checkpoint has it; None for what is no parameter."""
    if _NO_PARAMETER.search(name):
        return None
    for pattern, replacement in _ALIASES:
        name = pattern.sub(replacement, name)
    return name


def in_layer(name: str) -> tuple[int, str] | None:
    """(number of the layer, the rest) of a canonical name, None outside layers."""
    found = _LAYER.fullmatch(name)
    return (int(found[1]), found[2]) if found else None


@dataclass(frozen=True)
class Rows:
    """Our rows are runs of ``run`` rows of the fused tensor, the first at ``start`` and one every ``stride``."""

    name: str
    run: int
    stride: int
    start: int = 0


def source(name: str, shape: tuple[int, ...], config: ModelConfig) -> Rows:
    """Where a global tensor is."""
    prefix, inside = _OURS.fullmatch(name).groups()  # type: ignore[union-attr]
    table = _IN_LAYER if prefix else _MODULES
    stem = next(stem for stem in table if inside.startswith(stem))
    theirs = ("decoder." + prefix if prefix else "") + table[stem] + inside.removeprefix(stem)
    if stem in ("attention.q.", "attention.k.", "attention.v."):
        head = config.head_size
        queries = config.num_attention_heads // config.kv_heads * head
        run, start = {"q": (queries, 0), "k": (head, queries), "v": (head, queries + head)}[inside[10]]
        return Rows(theirs, run, queries + 2 * head, start)
    return Rows(theirs, shape[0], shape[0], _up_start(stem, config))


def _up_start(stem: str, config: ModelConfig) -> int:
    return config.ffn_size if stem == "mlp.up." and config.activation == "swiglu" else 0


def fused_shape(name: str, shape: tuple[int, ...], config: ModelConfig) -> tuple[int, ...]:
    """Of the tensor that holds a global one, in a distributed checkpoint but for its layers' dimension."""
    inside = _OURS.fullmatch(name)[2]  # type: ignore[index]
    rows = shape[0]
    if inside.startswith(("attention.q.", "attention.k.", "attention.v.")):
        rows = (config.num_attention_heads + 2 * config.kv_heads) * config.head_size
    elif inside.startswith(("mlp.gate.", "mlp.up.")) and config.activation == "swiglu":
        rows = 2 * config.ffn_size
    return (rows, *shape[1:])

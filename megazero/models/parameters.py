"""What parameters a decoder has, from its config alone. Pure Python, no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megazero.models.config import ModelConfig
from megazero.models.parts import attention_parts, mlp_parts

Shapes = dict[str, tuple[int, ...]]


def parameter_shapes(config: ModelConfig) -> Shapes:
    """Global name → shape of every parameter, in canonical order: embedding, layers ascending, norm, head.

    Matrices are (out, in). A tied head is the word embedding and has no entry. Vocabulary is not padded.
    """
    shapes: Shapes = {"embedding.word.weight": (config.vocab_size, config.hidden_size)}
    if config.position == "learned":
        shapes["embedding.position.weight"] = (config.max_position_embeddings, config.hidden_size)
    for index in range(config.num_layers):
        shapes.update((f"layers.{index}.{name}", shape) for name, shape in layer_shapes(config).items())
    shapes.update(_norm("final_norm", config))
    if not config.tie_word_embeddings:
        shapes["head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def layer_shapes(config: ModelConfig) -> Shapes:
    """Name inside a layer → shape, in canonical order; every layer has the same."""
    hidden = config.hidden_size
    shapes: Shapes = dict(_norm("attention_norm", config))
    for part in attention_parts(config):
        shapes.update(_projection(f"attention.{part.name}", part.size, hidden, config.qkv_bias))
    if config.qk_norm:
        shapes["attention.q_norm.weight"] = shapes["attention.k_norm.weight"] = (config.head_size,)
    inner = config.num_attention_heads * config.head_size
    shapes.update(_projection("attention.out", hidden, inner, config.out_bias))
    shapes.update(_norm("mlp_norm", config))
    for part in mlp_parts(config):
        shapes.update(_projection(f"mlp.{part.name}", part.size, hidden, config.mlp_bias))
    shapes.update(_projection("mlp.down", hidden, config.ffn_size, config.mlp_bias))
    return shapes


def parameter_count(config: ModelConfig) -> int:
    """Elements of all parameters; a tied embedding counts once, padding not at all."""
    return sum(math.prod(shape) for shape in parameter_shapes(config).values())


def matmul_parameter_count(config: ModelConfig) -> int:
    """Elements of the matrices every token is multiplied by: those of the layers, and the head, tied or not."""
    per_layer = sum(math.prod(shape) for shape in layer_shapes(config).values() if len(shape) == 2)
    return config.num_layers * per_layer + config.vocab_size * config.hidden_size


def flops_per_token(config: ModelConfig, seq_length: int) -> int:
    """Model FLOPs of forward and backward per trained token: 6 · (matmul parameters, head included) + 6 · L · h · s.

    h is the width of all heads together, s the sequence length; causal attention is counted half, recompute not at
    all.
    """
    attention = 6 * config.num_layers * config.num_attention_heads * config.head_size * seq_length
    return 6 * matmul_parameter_count(config) + attention


def _norm(name: str, config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (config.hidden_size,)
    if config.norm == "layernorm":
        yield f"{name}.bias", (config.hidden_size,)


def _projection(name: str, rows: int, columns: int, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)

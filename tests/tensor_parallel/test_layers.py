"""What each rank holds of a layer's matrices, as ShardSpecs say it."""

from __future__ import annotations

import pytest
import torch

from megazero.models.config import ModelConfig
from megazero.models.gpt import GPT
from megazero.models.parameters import parameter_shapes
from megazero.sharding import Piece, Rectangle, Replication, ShardSpec
from megazero.tensor_parallel.mappings import TensorParallel
from megazero.tensor_parallel.parallelize import parallelize

QWEN = {
    "num_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "ffn_hidden_size": 12,
    "norm": "rmsnorm",
    "activation": "swiglu",
    "position": "rotary",
    "qk_norm": True,
    "vocab_size": 37,
    "tie_word_embeddings": False,
}


def specs(tp: TensorParallel, multiple: int = 1, **fields) -> dict[str, ShardSpec]:
    config = ModelConfig(**{**QWEN, **fields})
    with torch.device("meta"):
        model = GPT(config)
    found = parallelize(model, tp, multiple, config.tie_word_embeddings)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == {
        name: spec.local_shape for name, spec in found.items()
    }
    return found


def test_one_rank_holds_every_tensor_whole() -> None:
    shapes = {}
    for spec in specs(TensorParallel()).values():
        for piece in spec.pieces:
            assert piece.box == Rectangle((0,) * len(piece.global_shape), piece.global_shape)
            assert piece.replication == ()
            shapes[piece.name] = piece.global_shape
    assert shapes == parameter_shapes(ModelConfig(**QWEN))


def test_heads_of_a_fused_projection() -> None:
    """4 query heads of 6 on 4 ranks: one each; 2 key heads: one for each two ranks, whose gradients are shares."""
    spec = specs(TensorParallel(4, 2))["layers.0.attention.qkv.weight"]
    pair = (Replication("tp", (2, 3), "partial"),)
    name = "layers.0.attention"
    assert spec == ShardSpec(
        (18, 8),
        (
            Piece(f"{name}.q.weight", (24, 8), Rectangle((12, 0), (6, 8)), 0),
            Piece(f"{name}.k.weight", (12, 8), Rectangle((6, 0), (6, 8)), 6, pair),
            Piece(f"{name}.v.weight", (12, 8), Rectangle((6, 0), (6, 8)), 12, pair),
        ),
    )
    bias = specs(TensorParallel(4, 2))["layers.0.attention.qkv.bias"]
    assert [(p.name, p.box.offsets, p.row) for p in bias.pieces] == [
        (f"{name}.q.bias", (12,), 0),
        (f"{name}.k.bias", (6,), 6),
        (f"{name}.v.bias", (6,), 12),
    ]


def test_row_parallel_matrices_are_cut_by_input() -> None:
    found = specs(TensorParallel(2, 1))
    assert found["layers.0.attention.out.weight"].pieces == (
        Piece("layers.0.attention.out.weight", (8, 24), Rectangle((0, 12), (8, 12))),
    )
    assert found["layers.0.mlp.inner.weight"].pieces == (
        Piece("layers.0.mlp.gate.weight", (12, 8), Rectangle((6, 0), (6, 8)), 0),
        Piece("layers.0.mlp.up.weight", (12, 8), Rectangle((6, 0), (6, 8)), 6),
    )


@pytest.mark.parametrize("sequence", [True, False])
def test_which_gradients_are_shares(sequence: bool) -> None:
    """Norms and row biases see a rank's own tokens under sequence parallelism; a head's norm its own heads always."""
    found = specs(TensorParallel(2, 0, sequence))
    usual = "partial" if sequence else "equal"
    for name, gradient in {
        "layers.0.attention_norm.weight": usual,
        "layers.0.mlp_norm.weight": usual,
        "final_norm.weight": usual,
        "layers.0.attention.out.bias": usual,
        "layers.0.mlp.down.bias": usual,
        "layers.0.attention.q_norm.weight": "partial",
        "layers.0.attention.k_norm.weight": "partial",
    }.items():
        assert found[name].pieces[0].replication == (Replication("tp", (0, 1), gradient),), name


@pytest.mark.parametrize(
    ("vocab_size", "multiple", "rows", "valid"),
    [
        (37, 1, 10, [10, 10, 10, 7]),
        (37, 8, 16, [16, 16, 5, 0]),
        (50257, 128, 12672, [12672, 12672, 12672, 12241]),
        (5, 1, 2, [2, 2, 1, 0]),
        (3, 128, 128, [3, 0, 0, 0]),
    ],
)
def test_rows_of_the_vocabulary(vocab_size: int, multiple: int, rows: int, valid: list[int]) -> None:
    start = 0
    for rank in range(4):
        found = specs(TensorParallel(4, rank), multiple, vocab_size=vocab_size, num_key_value_heads=4)
        for name in ("embedding.word.weight", "head.weight"):
            assert found[name].local_shape == (rows, 8)
            boxes = [(p.name, p.box) for p in found[name].pieces]
            assert boxes == ([(name, Rectangle((start, 0), (valid[rank], 8)))] if valid[rank] else [])
        start += valid[rank]
    assert start == vocab_size

"""A rank that starts from a Hugging Face directory reads its own slices of it and no more."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch

from megazero.checkpoint import save
from megazero.convert import export
from megazero.models.config import ModelConfig
from megazero.sharding import Rectangle
from tests.distributed import runs

MODEL = dict(
    **dict(num_layers=2, hidden_size=256, num_attention_heads=4, num_key_value_heads=2, ffn_hidden_size=512),
    **dict(vocab_size=512, max_position_embeddings=32, norm="rmsnorm", position="rotary", activation="swiglu"),
    **dict(qkv_bias=False, out_bias=False, mlp_bias=False, tie_word_embeddings=False),
)


def bytes_read(path: str) -> int:
    """What this rank reads of tensors on its way to an engine."""
    real, total = os.preadv, 0

    def counting(descriptor: int, buffers: list, offset: int) -> int:
        nonlocal total
        count = real(descriptor, buffers, offset)
        total += count
        return count

    tree = runs.settings({"init_from": path}, (2, 2, 1))
    with mock.patch.object(os, "preadv", counting), runs.make_engine(tree):  # which finds the architecture there
        return total


def test_each_of_four_ranks_reads_a_quarter(tmp_path: Path, ranks: Callable):
    weights = runs.random_weights(ModelConfig(**MODEL))
    chunks = [("weight", n, Rectangle((0,) * t.dim(), tuple(t.shape)), tuple(t.shape), t) for n, t in weights.items()]
    save(tmp_path / "ours", 0, chunks, meta={"model": ModelConfig(**MODEL).model_dump()})
    export(tmp_path / "ours", tmp_path / "hf")
    size = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    read = ranks(4, bytes_read, str(tmp_path / "hf"), timeout=600)
    # The norms are on both ranks of a stage.
    replicated = 2 * sum(tensor.numel() * 4 for tensor in weights.values() if tensor.dim() == 1)
    assert sum(read) <= size + replicated
    assert torch.tensor(read).float().div(size).sub(0.25).abs().max() < 0.01, [count / size for count in read]

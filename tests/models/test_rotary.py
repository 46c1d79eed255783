"""Rotary frequencies bitwise as transformers computes them, for shapes that models are published with."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from megazero.models import rotary
from megazero.models.config import ModelConfig, RopeScaling

CASES = {
    "llama2": (128, 10000.0, None),
    "llama3": (128, 500000.0, None),
    "llama3.1": (
        128,
        500000.0,
        dict(
            type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
        ),
    ),
    "llama3.2": (
        64,
        500000.0,
        dict(
            type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
        ),
    ),
    "linear": (128, 10000.0, dict(type="linear", factor=4.0)),
    "yarn": (128, 1000000.0, dict(type="yarn", factor=4.0, original_max_position_embeddings=32768)),
    "yarn-short": (64, 10000.0, dict(type="yarn", factor=16.0, original_max_position_embeddings=4096, beta_fast=20.0)),
    "yarn-no-stretch": (64, 10000.0, dict(type="yarn", factor=1.0, original_max_position_embeddings=4096)),
}


@pytest.mark.parametrize("case", CASES)
def test_tables_equal_transformers_bitwise(case: str) -> None:
    head_dim, theta, scaling = CASES[case]
    rope = {"rope_type": "default", "rope_theta": theta}
    if scaling:
        rope |= {"rope_type" if key == "type" else key: value for key, value in scaling.items()}
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=2 * head_dim, num_attention_heads=2, max_position_embeddings=131072, rope_parameters=rope
        )
    )
    config = ModelConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        max_position_embeddings=131072,
        position="rotary",
        rope_theta=theta,
        rope_scaling=RopeScaling(**scaling) if scaling else None,
    )
    inv_freq = rotary.inverse_frequencies(config)
    assert torch.equal(inv_freq, theirs.inv_freq)

    positions = torch.tensor([0, 1, 7, 4095, 131071])
    cos, sin = rotary.tables(inv_freq, rotary.amplitude(config), positions)
    their_cos, their_sin = theirs(torch.zeros(1, dtype=torch.float32), positions[None])
    assert cos.dtype == sin.dtype == torch.float32
    assert torch.equal(cos, their_cos[0]) and torch.equal(sin, their_sin[0])


def test_frequencies_ignore_the_default_dtype() -> None:
    config = ModelConfig(position="rotary")
    expected = rotary.inverse_frequencies(config)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(rotary.inverse_frequencies(config), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_half_precision_heads_are_rotated_in_float32() -> None:
    config = ModelConfig(hidden_size=64, num_attention_heads=1, position="rotary")
    cos, sin = rotary.tables(rotary.inverse_frequencies(config), 1.0, torch.arange(4000, 4008))
    x = torch.randn(1, 8, 1, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = rotary.rotate(x.double(), cos[None, :, None].double(), sin[None, :, None].double())
    assert torch.equal(rotary.rotate(x, cos[None, :, None], sin[None, :, None]), exact.bfloat16())

"""First loss of the reference runs: plain one-process forward on their first global batch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from megazero.models.config import ModelConfig
from megazero.models.context import build_context
from tests.models import hf_reference

ORACLE = Path(__file__).parents[1] / "fixtures" / "oracle"

CONFIGS = {
    "gpt2-tied": ModelConfig(
        num_layers=4, hidden_size=64, num_attention_heads=4, vocab_size=515, max_position_embeddings=64
    ),
    "llama-gqa": ModelConfig(
        num_layers=4,
        hidden_size=64,
        num_attention_heads=8,
        num_key_value_heads=2,
        ffn_hidden_size=172,
        vocab_size=1003,
        max_position_embeddings=128,
        norm="rmsnorm",
        activation="swiglu",
        position="rotary",
        rope_theta=500000.0,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        tie_word_embeddings=False,
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_first_loss_and_gradient_norm(case: str) -> None:
    config = CONFIGS[case]
    recipe = json.loads((ORACLE / case / "recipe.json").read_text())
    expected = json.loads((ORACLE / case / "expected.json").read_text())[0]
    model = hf_reference.load(config, AutoModelForCausalLM.from_pretrained(ORACLE / case / "hf_init"))
    batch, length = recipe["global_batch_size"], recipe["seq_length"]
    stream = torch.from_numpy(np.fromfile(ORACLE / case / "tokens.bin", dtype=np.uint16).astype(np.int64))
    samples = torch.stack([stream[i * length : (i + 1) * length + 1] for i in range(batch)])

    x_TH = model(samples[:, :-1].flatten(), build_context(config, length, batch))
    loss = F.cross_entropy(model.head(x_TH), samples[:, 1:].flatten())
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    assert loss.item() == pytest.approx(expected["loss"], rel=2e-6)
    assert norm.item() == pytest.approx(expected["grad_norm"], rel=5e-5)

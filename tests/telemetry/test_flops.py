"""Model FLOPs against torch's own counter and published numbers; peaks by device name."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from megazero.models.config import ModelConfig
from megazero.models.parameters import flops_per_token, matmul_parameter_count
from megazero.telemetry.peaks import device_peak_flops, peak_flops

LLAMA = {
    "norm": "rmsnorm",
    "activation": "swiglu",
    "position": "rotary",
    "qkv_bias": False,
    "out_bias": False,
    "mlp_bias": False,
}
GPT2 = ModelConfig()
LLAMA3_8B = ModelConfig(
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    num_key_value_heads=8,
    ffn_hidden_size=14336,
    vocab_size=128256,
    tie_word_embeddings=False,
    **LLAMA,
)


def test_matmul_parameters_of_published_models():
    # GPT-2 has 124,439,808 parameters: less positions, biases and norms, 12 · 12 · 768² and the head.
    assert matmul_parameter_count(GPT2) == 12 * 12 * 768**2 + 50257 * 768
    # Llama-3-8B has 8,030,261,248: less the input embedding and 65 norms of 4096.
    assert matmul_parameter_count(LLAMA3_8B) == 8_030_261_248 - 128256 * 4096 - 65 * 4096


@pytest.mark.parametrize("kv_heads, activation", [(4, "gelu"), (2, "swiglu")])
def test_flops_equal_torchs_count_of_a_plain_decoder(kv_heads, activation):
    """Attention in full (torch counts no mask) is twice what a causal model is charged."""
    layers, width, heads, size, inner, vocab, seq = 2, 24, 4, 8, 40, 96, 16
    config = ModelConfig(
        num_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=size,
        ffn_hidden_size=inner,
        vocab_size=vocab,
        activation=activation,
    )

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, requires_grad=True)

    x = weight(seq, width)
    with FlopCounterMode(display=False) as counter:
        y = x
        for _ in range(layers):
            q, k, v = (
                (y @ weight(width, n * size)).view(1, seq, n, size).transpose(1, 2) for n in (heads, kv_heads, kv_heads)
            )
            k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
            attended = ((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).reshape(seq, heads * size)
            y = y + attended @ weight(heads * size, width)
            hidden = y @ weight(width, inner)
            if activation == "swiglu":
                hidden = F.silu(hidden) * (y @ weight(width, inner))
            y = y + hidden @ weight(inner, width)
        (y @ weight(width, vocab)).sum().backward()
    # x needs a gradient, so the first projection is charged for it as the others are.
    attention_half = 6 * layers * heads * size * seq * seq
    assert counter.get_total_flops() - attention_half == seq * flops_per_token(config, seq)


@pytest.mark.parametrize(
    "name, precision, peak",
    [
        ("NVIDIA H200", "bf16", 989e12),
        ("NVIDIA H100 80GB HBM3", "fp16", 989e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA B200", "bf16", 2250e12),
        ("NVIDIA GeForce RTX 4090", "bf16", 165e12),
        ("AMD Instinct MI300X", "bf16", 1307e12),
        ("NVIDIA H200", "fp32", None),
        ("Some Other Chip", "bf16", None),
    ],
)
def test_peaks(name, precision, peak):
    assert peak_flops(name, precision) == peak


def test_a_cpu_has_no_peak():
    assert device_peak_flops(torch.device("cpu"), "bf16") is None

"""Names, shapes and counts from a config alone, against the modules and published model sizes."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from megazero.models.config import ModelConfig
from megazero.models.gpt import GPT
from megazero.models.parameters import matmul_parameter_count, parameter_count, parameter_shapes

LLAMA = dict(
    norm="rmsnorm",
    activation="swiglu",
    position="rotary",
    qkv_bias=False,
    out_bias=False,
    mlp_bias=False,
    tie_word_embeddings=False,
)


def llama(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int, **changes) -> ModelConfig:
    return ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab,
        **{**LLAMA, **changes},
    )


# Sizes that the models' own checkpoints have, in elements.
PUBLISHED = {
    "gpt2": (ModelConfig(), 124_439_808),
    "gpt2-xl": (ModelConfig(num_layers=48, hidden_size=1600, num_attention_heads=25), 1_557_611_200),
    "llama2-7b": (llama(32, 4096, 11008, 32, 32, 32000), 6_738_415_616),
    "llama3-8b": (llama(32, 4096, 14336, 32, 8, 128256), 8_030_261_248),
    "llama3.1-405b": (llama(126, 16384, 53248, 128, 8, 128256), 405_853_388_800),
    "mistral-7b": (llama(32, 4096, 14336, 32, 8, 32000), 7_241_732_096),
    "qwen2.5-0.5b": (llama(24, 896, 4864, 14, 2, 151936, qkv_bias=True, tie_word_embeddings=True), 494_032_768),
    "qwen3-0.6b": (
        llama(28, 1024, 3072, 16, 8, 151936, head_dim=128, qk_norm=True, tie_word_embeddings=True),
        596_049_920,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_count_is_the_published_one(name: str) -> None:
    config, count = PUBLISHED[name]
    assert parameter_count(config) == count


@pytest.mark.parametrize("name", PUBLISHED)
def test_shapes_are_the_modules(name: str) -> None:
    config = PUBLISHED[name][0].model_copy(update={"num_layers": 2})
    with torch.device("meta"):
        model = GPT(config)
    expected = {}
    for path, parameter in model.named_parameters():
        module, attribute = model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]
        if hasattr(module, "parts"):
            parent = path.rsplit(".", 2)[0]
            for part in module.parts:
                expected[f"{parent}.{part.name}.{attribute}"] = (part.size, *parameter.shape[1:])
        else:
            expected[path] = tuple(parameter.shape)
    assert parameter_shapes(config) == expected


def test_matmul_parameters_of_gpt2() -> None:
    # 12 layers of 12 h² weights, and the head, though it is tied.
    assert matmul_parameter_count(ModelConfig()) == 12 * 12 * 768**2 + 50257 * 768


def test_needs_no_torch() -> None:
    code = "import sys, megazero.models.parameters; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

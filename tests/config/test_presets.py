"""Presets have the published shapes: the models that transformers builds from them have the published sizes."""

import functools

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from megazero.config import Config
from megazero.presets import PRESETS

# Sums of the tensors in the published checkpoints' safetensors files, a tied head counted once. GPT-3 was never
# released: its sizes are those of table D.1 of the paper, in millions.
PUBLISHED = {
    "gpt2-124m": 124_439_808,
    "gpt2-355m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
}
PUBLISHED_MILLIONS = {
    "gpt3-125m": 125,
    "gpt3-1.3b": 1320,
    "gpt3-6.7b": 6660,
    "gpt3-13b": 12850,
    "gpt3-175b": 174600,
}


def architecture(name):
    return Config(model={"preset": name}).model.architecture


@functools.cache
def reference(name):
    """The same shape as a transformers model: name → elements of each parameter, of its first layer only."""
    model = architecture(name)
    if model.position == "learned":
        config = GPT2Config(
            vocab_size=model.vocab_size,
            n_positions=model.max_position_embeddings,
            n_embd=model.hidden_size,
            n_layer=1,
            n_head=model.num_attention_heads,
            n_inner=model.ffn_hidden_size,
        )
        family = GPT2LMHeadModel
    else:
        config_class, family = {
            "llama": (LlamaConfig, LlamaForCausalLM),
            "qwen2": (Qwen2Config, Qwen2ForCausalLM),
            "qwen3": (Qwen3Config, Qwen3ForCausalLM),
            "mistr": (MistralConfig, MistralForCausalLM),
        }[name[:5]]
        config = config_class(
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            intermediate_size=model.ffn_hidden_size,
            num_hidden_layers=1,
            num_attention_heads=model.num_attention_heads,
            num_key_value_heads=model.num_key_value_heads,
            max_position_embeddings=model.max_position_embeddings,
            tie_word_embeddings=model.tie_word_embeddings,
            head_dim=model.head_size,
        )
    with torch.device("meta"):
        # named_parameters() names a tied weight once
        return {parameter: value.numel() for parameter, value in family(config).named_parameters()}


@pytest.mark.parametrize("name", PRESETS)
def test_total_parameters(name):
    layers = architecture(name).num_layers  # all alike
    total = sum(size * (layers if ".0." in parameter else 1) for parameter, size in reference(name).items())
    if name in PUBLISHED:
        assert total == PUBLISHED[name]
    else:
        assert total == pytest.approx(PUBLISHED_MILLIONS[name] * 1e6, rel=5e-3)


@pytest.mark.parametrize("name", PRESETS)
def test_biases_and_norms_are_those_of_the_family(name):
    model, names = architecture(name), list(reference(name))
    attention = ("c_attn", "q_proj")
    assert model.qkv_bias == any(n.endswith(".bias") and any(a in n for a in attention) for n in names)
    assert model.out_bias == any(n.endswith((".attn.c_proj.bias", "o_proj.bias")) for n in names)
    assert model.mlp_bias == any(".mlp." in n and n.endswith(".bias") for n in names)
    assert model.qk_norm == any("q_norm" in n for n in names)
    assert (model.norm == "layernorm") == any(n.endswith("ln_f.bias") for n in names)


def test_transformers_defaults_agree():
    """Where the library's own default config is one of these models."""
    gpt2, ours = GPT2Config(), architecture("gpt2-124m")
    assert (gpt2.n_layer, gpt2.n_embd, gpt2.n_head) == (ours.num_layers, ours.hidden_size, ours.num_attention_heads)
    assert (gpt2.vocab_size, gpt2.n_positions) == (ours.vocab_size, ours.max_position_embeddings)
    assert gpt2.layer_norm_epsilon == ours.norm_eps
    mistral, ours = MistralConfig(), architecture("mistral-7b-v0.1")
    assert mistral.sliding_window == ours.sliding_window
    assert mistral.intermediate_size == ours.ffn_hidden_size
    assert mistral.num_key_value_heads == ours.num_key_value_heads


@pytest.mark.parametrize("name, tp", [("llama3.1-405b", 16), ("gpt3-175b", 96), ("qwen2.5-0.5b", 2), ("gpt2-1.5b", 25)])
def test_presets_can_be_cut(name, tp):
    Config.from_dict({"model": {"preset": name}, "parallel": {"tp": tp}}, world_size=tp)

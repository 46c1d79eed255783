"""Every family against transformers' own model: logits and gradients, in float64 and float32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
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

from megazero.models.config import ModelConfig, RopeScaling
from megazero.models.context import build_context
from tests.models import hf_reference

BATCH, SEQ, VOCAB = 3, 24, 61

SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=44,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    attn_implementation="sdpa",
)
OURS = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    num_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    ffn_hidden_size=44,
    max_position_embeddings=64,
    norm="rmsnorm",
    activation="swiglu",
    position="rotary",
    qkv_bias=False,
    out_bias=False,
    mlp_bias=False,
    tie_word_embeddings=False,
)


def gpt2():
    theirs = GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=32,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        attn_implementation="sdpa",
    )
    ours = ModelConfig(
        vocab_size=VOCAB, hidden_size=32, num_layers=2, num_attention_heads=4, max_position_embeddings=32
    )
    return GPT2LMHeadModel(theirs), ours


def llama(ours=None, scaling=None, theta=10000.0, **theirs):
    rope = {"rope_type": "default", **(scaling or {}), "rope_theta": theta}
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "rope_parameters": rope, **theirs}))
    fields = {**OURS, "rope_theta": theta, **(ours or {})}
    if scaling:
        values = {key: value for key, value in scaling.items() if key != "rope_type"}
        fields["rope_scaling"] = RopeScaling(type=scaling["rope_type"], **values)
    return model, ModelConfig(**fields)


def qwen2():
    ours = {**OURS, "qkv_bias": True, "tie_word_embeddings": True, "rope_theta": 1e6}
    rope = {"rope_type": "default", "rope_theta": 1e6}
    theirs = Qwen2Config(**SIZES, tie_word_embeddings=True, rope_parameters=rope)
    return Qwen2ForCausalLM(theirs), ModelConfig(**ours)


def qwen3():
    theirs = Qwen3Config(**SIZES, head_dim=12, tie_word_embeddings=False)
    return Qwen3ForCausalLM(theirs), ModelConfig(**OURS, head_dim=12, qk_norm=True)


def mistral(window):
    theirs = MistralConfig(**SIZES, head_dim=8, sliding_window=window)
    return MistralForCausalLM(theirs), ModelConfig(**OURS, sliding_window=window)


LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)

FAMILIES = {
    "gpt2": gpt2,
    "llama2": lambda: llama(dict(num_key_value_heads=4), num_key_value_heads=4),
    "llama-gqa": llama,
    "llama-biases": lambda: llama(
        dict(qkv_bias=True, out_bias=True, mlp_bias=True), attention_bias=True, mlp_bias=True
    ),
    "llama-head-dim-tied": lambda: llama(
        dict(head_dim=20, tie_word_embeddings=True), head_dim=20, tie_word_embeddings=True
    ),
    "llama-one-kv-head": lambda: llama(dict(num_key_value_heads=1), num_key_value_heads=1),
    "llama3-scaling": lambda: llama(scaling=LLAMA3, theta=500000.0),
    "linear-scaling": lambda: llama(scaling=dict(rope_type="linear", factor=2.5)),
    "yarn-scaling": lambda: llama(scaling=YARN),
    "yarn-attention-factor": lambda: llama(scaling={**YARN, "attention_factor": 0.7, "beta_fast": 4.0}),
    "qwen2": qwen2,
    "qwen3": qwen3,
    "mistral-window-5": lambda: mistral(5),
    "mistral-window-beyond": lambda: mistral(40),
}


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["float64", "float32"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_equal_transformers(family: str, dtype: torch.dtype, tolerance: float) -> None:
    theirs, config = FAMILIES[family]()
    hf_reference.randomize(theirs)
    theirs = theirs.to(dtype).train()
    if dtype == torch.float64:
        hf_reference.take_statistics_in_float64(theirs)
    ours = hf_reference.load(config, theirs).train()
    tokens = torch.randint(VOCAB, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(1))
    targets = tokens[:, 1:].flatten()

    expected = theirs(tokens[:, :-1], use_cache=False).logits.flatten(0, 1)
    logits = ours.head(ours(tokens[:, :-1].flatten(), build_context(config, SEQ, BATCH)))
    assert relative_error(logits, expected) < tolerance

    F.cross_entropy(expected, targets).backward()
    F.cross_entropy(logits, targets).backward()
    gradients = hf_reference.our_tensors({name: p.grad for name, p in theirs.named_parameters()})
    assert gradients.keys() == dict(ours.named_parameters()).keys()
    for name, parameter in ours.named_parameters():
        assert relative_error(parameter.grad, gradients[name]) < tolerance, name


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()

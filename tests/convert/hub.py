"""Directories as the hub has them: config.json of before transformers 5, names and buffers of old files, 16 bits.

Sizes are small, the fields and their spelling are those of the published models.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

GPT2 = dict(
    model_type="gpt2",
    architectures=["GPT2LMHeadModel"],
    activation_function="gelu_new",
    attn_pdrop=0.1,
    embd_pdrop=0.1,
    resid_pdrop=0.1,
    bos_token_id=96,
    eos_token_id=96,
    initializer_range=0.02,
    layer_norm_epsilon=1e-05,
    n_ctx=64,
    n_embd=32,
    n_head=4,
    n_layer=2,
    n_positions=64,
    summary_type="cls_index",
    task_specific_params={"text-generation": {"do_sample": True, "max_length": 50}},
    vocab_size=97,
)
LLAMA2 = dict(
    model_type="llama",
    architectures=["LlamaForCausalLM"],
    bos_token_id=1,
    eos_token_id=2,
    hidden_act="silu",
    hidden_size=32,
    initializer_range=0.02,
    intermediate_size=48,
    max_position_embeddings=64,
    num_attention_heads=4,
    num_hidden_layers=2,
    num_key_value_heads=4,
    pretraining_tp=1,
    rms_norm_eps=1e-05,
    rope_scaling=None,
    tie_word_embeddings=False,
    torch_dtype="float16",
    transformers_version="4.31.0.dev0",
    use_cache=True,
    vocab_size=97,
)
LLAMA3 = LLAMA2 | dict(
    attention_bias=False,
    attention_dropout=0.0,
    bos_token_id=90,
    eos_token_id=[91, 92, 93],
    mlp_bias=False,
    num_key_value_heads=2,
    rope_theta=500000.0,
    torch_dtype="bfloat16",
)
LLAMA31_ROPE = dict(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16, rope_type="llama3"
)
MISTRAL = {
    key: value for key, value in LLAMA2.items() if key not in ("rope_scaling", "pretraining_tp", "torch_dtype")
} | dict(
    model_type="mistral",
    architectures=["MistralForCausalLM"],
    num_key_value_heads=2,
    rope_theta=10000.0,
    sliding_window=7,
    torch_dtype="bfloat16",
)
QWEN2 = dict(
    model_type="qwen2",
    architectures=["Qwen2ForCausalLM"],
    attention_dropout=0.0,
    bos_token_id=95,
    eos_token_id=96,
    hidden_act="silu",
    hidden_size=32,
    initializer_range=0.02,
    intermediate_size=48,
    max_position_embeddings=64,
    max_window_layers=2,
    num_attention_heads=4,
    num_hidden_layers=2,
    num_key_value_heads=2,
    rms_norm_eps=1e-06,
    rope_theta=1000000.0,
    sliding_window=7,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    transformers_version="4.40.1",
    use_cache=True,
    use_mrope=False,
    use_sliding_window=False,
    vocab_size=97,
)
QWEN3 = {key: value for key, value in QWEN2.items() if key != "use_mrope"} | dict(
    model_type="qwen3",
    architectures=["Qwen3ForCausalLM"],
    attention_bias=False,
    head_dim=16,
    rope_scaling=None,
    sliding_window=None,
    transformers_version="4.51.0",
)


@dataclass(frozen=True)
class Version:
    """``style``: what the files hold besides parameters, see _as_stored. ``shards``: how many files."""

    config: dict[str, Any]
    dtype: torch.dtype = torch.bfloat16
    style: str = ""
    shards: int = 1


VERSIONS = {
    "gpt2": Version(GPT2, torch.float32, "bare"),
    "gpt2-head_stored": Version(GPT2, torch.float32, "head"),
    "gpt2-untied": Version(GPT2 | dict(tie_word_embeddings=False), torch.float32),
    "llama-2": Version(LLAMA2, torch.float16, "inv_freq", shards=2),
    "llama-3": Version(LLAMA3, shards=3),
    "llama-3.1": Version(LLAMA3 | dict(rope_scaling=LLAMA31_ROPE)),
    "llama-3.2": Version(
        LLAMA3 | dict(rope_scaling=LLAMA31_ROPE | dict(factor=32.0), tie_word_embeddings=True, head_dim=8)
    ),
    "mistral-v0.1": Version(MISTRAL),
    "mistral-v0.3": Version(MISTRAL | dict(sliding_window=None, rope_theta=1000000.0), shards=2),
    "qwen2": Version(QWEN2),
    "qwen2.5-tied": Version(QWEN2 | dict(tie_word_embeddings=True, max_window_layers=1)),
    "qwen3": Version(QWEN3, shards=2),
    "qwen3-tied": Version(QWEN3 | dict(tie_word_embeddings=True)),
}


def write(name: str, directory: Path) -> dict[str, torch.Tensor]:
    """The directory; returns its parameters as stored, under the names that transformers gives them."""
    import transformers  # here, so that ranks that read a directory need not

    version = VERSIONS[name]
    config = transformers.AutoConfig.for_model(**version.config)
    model = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(11)
    parameters = {
        key: (torch.randn(value.shape, generator=generator) * 0.3).to(version.dtype)
        for key, value in model.named_parameters()
    }
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(version.config))
    (directory / "tokenizer.json").write_text(f'{{"of": "{name}"}}')
    (directory / "generation_config.json").write_text('{"temperature": 0.6}')
    stored = _as_stored(parameters, version)
    names = list(stored)
    if version.shards == 1:
        safetensors.torch.save_file(stored, directory / "model.safetensors")
    else:
        weight_map = {
            key: f"model-{number % version.shards + 1:05d}-of-{version.shards:05d}.safetensors"
            for number, key in enumerate(names)
        }
        for shard in set(weight_map.values()):
            part = {key: stored[key] for key in names if weight_map[key] == shard}
            safetensors.torch.save_file(part, directory / shard, metadata={"format": "pt"})
        (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return parameters


def _as_stored(parameters: dict[str, torch.Tensor], version: Version) -> dict[str, torch.Tensor]:
    stored, config = dict(parameters), version.config
    if version.style == "bare":
        stored = {key.removeprefix("transformer."): value for key, value in parameters.items()}
    for layer in range(config.get("n_layer", 0) if version.style else 0):
        prefix = "" if version.style == "bare" else "transformer."
        stored[f"{prefix}h.{layer}.attn.bias"] = torch.ones(1, 1, 64, 64, dtype=torch.uint8).tril()
        stored[f"{prefix}h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    if version.style == "head":
        stored["lm_head.weight"] = parameters["transformer.wte.weight"].clone()
    if version.style == "inv_freq":
        for layer in range(config["num_hidden_layers"]):
            inv_freq = 10000.0 ** (-torch.arange(0, 8, 2) / 8)
            stored[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = inv_freq
    return stored


def logits(directory: Path, tokens_BS: torch.Tensor) -> torch.Tensor:
    """transformers' own, in float32."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        return model(tokens_BS).logits

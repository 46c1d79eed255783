"""Tiny Hugging Face models with random weights, and what transformers itself generates from them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megazero.convert import open_weights
from megazero.generation import Generator, build_generator, inference_config
from megazero.launch.environment import ProcessEnvironment
from tests.models.hf_reference import randomize

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCAB = 300  # beyond one padded share of 128 rows, so that tensor-parallel ranks have tokens each
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)
GPT2 = dict(vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=96)
LLAMA3 = dict(
    rope_type="llama3",
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
    rope_theta=500.0,
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, rope_theta=1000.0)

# name → (transformers' config class, its arguments); GPT-2's dropout is at its default, 0.1.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", GPT2),
    "llama3": ("LlamaConfig", SIZES | dict(rope_parameters=LLAMA3)),
    "llama-one-kv-head": ("LlamaConfig", SIZES | dict(num_key_value_heads=1)),
    "mistral": ("MistralConfig", SIZES | dict(sliding_window=7)),
    "qwen2": ("Qwen2Config", SIZES | dict(tie_word_embeddings=True)),
    "qwen2-yarn": ("Qwen2Config", SIZES | dict(rope_parameters=YARN)),
    "qwen3": ("Qwen3Config", SIZES | dict(head_dim=12)),
}


def build(name: str) -> PreTrainedModel:
    """In float32, on the CPU; no token ends its text."""
    import transformers  # here, so that ranks of a generator need not

    config_class, arguments = MODELS[name]
    config = getattr(transformers, config_class)(**arguments, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    randomize(model)
    return model.float()


def expected(model: PreTrainedModel, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
    """transformers' greedy continuations, each prompt alone."""
    found = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
        found.append(out[0, len(prompt) :].tolist())
    return found


def prompts(lengths: Sequence[int], seed: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]


def open_generator(directory: Path, tp: int = 1, pp: int = 1, rank: int = 0) -> Generator:
    """This rank's generator in float32, in the process group that is there."""
    weights = open_weights(directory)
    config = inference_config(weights.config, tp, pp, tp * pp)
    return build_generator(weights, config, ProcessEnvironment(rank, rank, tp * pp), "fp32")

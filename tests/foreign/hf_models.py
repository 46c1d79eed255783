"""Tiny random models of Hugging Face, and adapters on one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

VOCABULARY = 61


def gpt2(**changes: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 24, "n_layer": 3, "n_head": 3, "n_positions": 32, "vocab_size": VOCABULARY}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropouts, bos_token_id=0, eos_token_id=None, **changes))


def _decoder_sizes(**changes: Any) -> dict[str, Any]:
    sizes = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "max_position_embeddings": 32,
        "vocab_size": VOCABULARY,
        "bos_token_id": 0,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return sizes | changes


def llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_decoder_sizes(**changes)))


def qwen2() -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**_decoder_sizes(tie_word_embeddings=True)))


def recomputed_gpt2() -> nn.Module:
    model = gpt2()
    model.gradient_checkpointing_enable()
    return model


def recomputed_llama() -> nn.Module:
    model = llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads()
    return model


def lora() -> nn.Module:
    """A llama with adapters on its attention, recomputed; the base is frozen."""
    import peft

    base = llama()
    base.gradient_checkpointing_enable()
    base.enable_input_require_grads()
    model = peft.get_peft_model(
        base, peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    )
    with torch.no_grad():  # peft starts one factor at zero, which would hide the other's gradient
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model


FAMILIES = {
    "gpt2": gpt2,
    "llama": llama,
    "qwen2": qwen2,
    "gpt2, recomputed": recomputed_gpt2,
    "llama, recomputed by reentrant checkpoints": recomputed_llama,
    "llama with adapters": lora,
}

"""Hugging Face models as the reference: tiny random ones, and their tensors under our names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from megazero.models.config import ModelConfig
from megazero.models.gpt import GPT

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GPT2_NAMES = {
    "transformer.wte.weight": "embedding.word.weight",
    "transformer.wpe.weight": "embedding.position.weight",
    "transformer.ln_f.": "final_norm.",
    "transformer.h.": "layers.",
    ".ln_1.": ".attention_norm.",
    ".ln_2.": ".mlp_norm.",
    ".attn.c_attn.": ".attention.qkv.",
    ".attn.c_proj.": ".attention.out.",
    ".mlp.c_fc.": ".mlp.inner.",
    ".mlp.c_proj.": ".mlp.down.",
    "lm_head.": "head.",
}
LLAMA_NAMES = {
    "model.embed_tokens.": "embedding.word.",
    "model.norm.": "final_norm.",
    "model.layers.": "layers.",
    ".input_layernorm.": ".attention_norm.",
    ".post_attention_layernorm.": ".mlp_norm.",
    ".self_attn.o_proj.": ".attention.out.",
    ".self_attn.": ".attention.",
    ".mlp.down_proj.": ".mlp.down.",
    "lm_head.": "head.",
}
FUSED = {
    ".attention.qkv.": (".attention.q_proj.", ".attention.k_proj.", ".attention.v_proj."),
    ".mlp.inner.": (".mlp.gate_proj.", ".mlp.up_proj."),
}


def randomize(model: PreTrainedModel, seed: int = 0) -> None:
    """Values that let no tensor hide: biases not zero, norm weights not one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if parameter.dim() == 1 and name.endswith("weight") else 0.0
            values = torch.empty(parameter.shape, dtype=torch.float64).normal_(centre, 0.2, generator=generator)
            parameter.copy_(values)


def take_statistics_in_float64(model: PreTrainedModel) -> None:
    """Put torch's RMSNorm for Hugging Face's, which rounds to float32 even in a float64 model."""
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if type(module).__name__.endswith("RMSNorm") and not isinstance(module, nn.RMSNorm):
                exact = nn.RMSNorm(module.weight.shape, module.variance_epsilon, dtype=torch.float64)
                exact.weight = module.weight
                setattr(parent, name, exact)


def our_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors (weights or gradients) by Hugging Face's names → by our modules' names, fused and transposed as ours."""
    is_gpt2 = any("transformer.h." in name for name in tensors)
    renamed: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        for theirs, ours in (GPT2_NAMES if is_gpt2 else LLAMA_NAMES).items():
            name = name.replace(theirs, ours)
        # GPT-2's projections are stored (in, out).
        transposed = is_gpt2 and tensor.dim() == 2 and (".attention." in name or ".mlp." in name)
        renamed[name] = tensor.T if transposed else tensor
    for fused, parts in FUSED.items():
        for name in [n for n in renamed if parts[0] in n]:
            pieces = [renamed.pop(name.replace(parts[0], part)) for part in parts]
            renamed[name.replace(parts[0], fused)] = torch.cat(pieces)
    return renamed


def load(config: ModelConfig, model: PreTrainedModel) -> GPT:
    """Our model in the reference's dtype with its weights; strict, so every tensor has a counterpart."""
    ours = GPT(config).to(next(model.parameters()).dtype)
    tensors = our_tensors(dict(model.named_parameters()))
    if config.tie_word_embeddings:
        tensors["head.weight"] = tensors["embedding.word.weight"]
    ours.load_state_dict(tensors, strict=True)
    return ours

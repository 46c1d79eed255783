"""Published shapes of well-known models, as fields of ModelConfig.

Sources: GPT-2 (Radford et al. 2019) and the released checkpoints; GPT-3 (Brown et al. 2020, tables 2.1 and D.1,
dense attention throughout); Llama 2 and 3, Qwen2.5, Qwen3 and Mistral 7B as in the config.json of their base models.
"""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {}


def _gpt(name: str, layers: int, hidden: int, heads: int, positions: int = 1024) -> None:
    # The rest is ModelConfig's defaults, written out so that a preset is whole by itself.
    PRESETS[name] = dict(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        vocab_size=50257,
        max_position_embeddings=positions,
        norm="layernorm",
        norm_eps=1e-5,
        activation="gelu_tanh",
        position="learned",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    )


def _llama(
    name: str, layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int, positions: int, **changes: Any
) -> None:
    """The family of pre-norm decoders with RMSNorm, rotary positions and SwiGLU."""
    base: dict[str, Any] = dict(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        ffn_hidden_size=ffn,
        vocab_size=vocab,
        max_position_embeddings=positions,
        norm="rmsnorm",
        norm_eps=1e-5,
        activation="swiglu",
        position="rotary",
        rope_theta=10000.0,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        tie_word_embeddings=False,
    )
    PRESETS[name] = {**base, **changes}


def _qwen(
    name: str, layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int, positions: int, **changes: Any
) -> None:
    changes = {"norm_eps": 1e-6, "rope_theta": 1_000_000.0, **changes}
    _llama(name, layers, hidden, ffn, heads, kv_heads, vocab, positions, **changes)


_gpt("gpt2-124m", 12, 768, 12)
_gpt("gpt2-355m", 24, 1024, 16)
_gpt("gpt2-774m", 36, 1280, 20)
_gpt("gpt2-1.5b", 48, 1600, 25)

# Where table 2.1 contradicts the parameter counts of table D.1 (24 heads in the 1.3B, width 5140 in the 13B), the
# counts decide: 16 heads give 1,320M and width 5120 gives 12,850M.
_gpt("gpt3-125m", 12, 768, 12, positions=2048)
_gpt("gpt3-1.3b", 24, 2048, 16, positions=2048)
_gpt("gpt3-6.7b", 32, 4096, 32, positions=2048)
_gpt("gpt3-13b", 40, 5120, 40, positions=2048)
_gpt("gpt3-175b", 96, 12288, 96, positions=2048)

_llama("llama2-7b", 32, 4096, 11008, 32, 32, 32000, 4096)
_llama("llama2-13b", 40, 5120, 13824, 40, 40, 32000, 4096)
_llama("llama2-70b", 80, 8192, 28672, 64, 8, 32000, 4096)
_llama("llama3-8b", 32, 4096, 14336, 32, 8, 128256, 8192, rope_theta=500000.0)
_llama("llama3-70b", 80, 8192, 28672, 64, 8, 128256, 8192, rope_theta=500000.0)


def _llama3_scaling(factor: float) -> dict[str, Any]:
    return dict(
        type="llama3", factor=factor, original_max_position_embeddings=8192, low_freq_factor=1.0, high_freq_factor=4.0
    )


_llama3_long: dict[str, Any] = dict(rope_theta=500000.0, rope_scaling=_llama3_scaling(8.0))
_llama3_small: dict[str, Any] = dict(rope_theta=500000.0, rope_scaling=_llama3_scaling(32.0), tie_word_embeddings=True)
_llama("llama3.1-8b", 32, 4096, 14336, 32, 8, 128256, 131072, **_llama3_long)
_llama("llama3.1-70b", 80, 8192, 28672, 64, 8, 128256, 131072, **_llama3_long)
_llama("llama3.1-405b", 126, 16384, 53248, 128, 8, 128256, 131072, **_llama3_long)
_llama("llama3.2-1b", 16, 2048, 8192, 32, 8, 128256, 131072, head_dim=64, **_llama3_small)
_llama("llama3.2-3b", 28, 3072, 8192, 24, 8, 128256, 131072, head_dim=128, **_llama3_small)

_qwen2: dict[str, Any] = dict(qkv_bias=True)
_qwen("qwen2.5-0.5b", 24, 896, 4864, 14, 2, 151936, 32768, tie_word_embeddings=True, **_qwen2)
_qwen("qwen2.5-1.5b", 28, 1536, 8960, 12, 2, 151936, 131072, tie_word_embeddings=True, **_qwen2)
_qwen("qwen2.5-3b", 36, 2048, 11008, 16, 2, 151936, 32768, tie_word_embeddings=True, **_qwen2)
_qwen("qwen2.5-7b", 28, 3584, 18944, 28, 4, 152064, 131072, **_qwen2)
_qwen("qwen2.5-14b", 48, 5120, 13824, 40, 8, 152064, 131072, norm_eps=1e-5, **_qwen2)
_qwen("qwen2.5-32b", 64, 5120, 27648, 40, 8, 152064, 131072, norm_eps=1e-5, **_qwen2)
_qwen("qwen2.5-72b", 80, 8192, 29568, 64, 8, 152064, 131072, norm_eps=1e-5, **_qwen2)

_qwen3: dict[str, Any] = dict(head_dim=128, qk_norm=True)
_qwen("qwen3-0.6b", 28, 1024, 3072, 16, 8, 151936, 32768, tie_word_embeddings=True, **_qwen3)
_qwen("qwen3-1.7b", 28, 2048, 6144, 16, 8, 151936, 32768, tie_word_embeddings=True, **_qwen3)
_qwen("qwen3-4b", 36, 2560, 9728, 32, 8, 151936, 32768, tie_word_embeddings=True, **_qwen3)
_qwen("qwen3-8b", 36, 4096, 12288, 32, 8, 151936, 32768, **_qwen3)
_qwen("qwen3-14b", 40, 5120, 17408, 40, 8, 151936, 32768, **_qwen3)
_qwen("qwen3-32b", 64, 5120, 25600, 64, 8, 151936, 40960, **_qwen3)  # has no base model

_llama("mistral-7b-v0.1", 32, 4096, 14336, 32, 8, 32000, 32768, sliding_window=4096)
_llama("mistral-7b-v0.3", 32, 4096, 14336, 32, 8, 32768, 32768, rope_theta=1_000_000.0)

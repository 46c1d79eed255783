"""The architecture of a decoder: every size and choice that makes it GPT-2, Llama, Qwen or Mistral."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class RopeScaling(BaseModel):
    """How rotary frequencies are stretched beyond the length a model was first trained at."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["linear", "llama3", "yarn"] = Field(description="scaling rule")
    factor: float = Field(description="stretch factor, new length / original length")
    original_max_position_embeddings: int | None = Field(None, description="length before scaling (llama3, yarn)")
    low_freq_factor: float = Field(1.0, description="llama3: wavelengths above original/this are stretched whole")
    high_freq_factor: float = Field(4.0, description="llama3: wavelengths below original/this are kept")
    beta_fast: float = Field(32.0, description="yarn: rotations over the original length above which nothing changes")
    beta_slow: float = Field(1.0, description="yarn: rotations below which a frequency is stretched whole")
    attention_factor: float | None = Field(None, description="yarn: factor on cos and sin; unset: 0.1 ln(factor) + 1")


class ModelConfig(BaseModel):
    """Sizes and choices of one decoder-only transformer. Defaults are GPT-2's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_layers: int = Field(12, ge=1, description="transformer layers")
    hidden_size: int = Field(768, ge=1, description="width of the residual stream")
    num_attention_heads: int = Field(12, ge=1, description="query heads per layer")
    num_key_value_heads: int | None = Field(None, description="key/value heads per layer; unset: one per query head")
    head_dim: int | None = Field(None, description="width of one head; unset: hidden_size / num_attention_heads")
    ffn_hidden_size: int | None = Field(None, description="inner width of the MLP; unset: 4 x hidden_size")
    vocab_size: int = Field(50257, ge=1, description="tokens in the vocabulary, before padding")
    max_position_embeddings: int = Field(1024, ge=1, description="longest sequence, in tokens")
    norm: Literal["layernorm", "rmsnorm"] = Field("layernorm", description="normalisation")
    norm_eps: float = Field(1e-5, gt=0, description="added to the variance in norms")
    activation: str = Field("gelu_tanh", description="gelu, gelu_tanh, relu, silu, swiglu, or a registered one")
    attention: str = Field("softmax", description="attention: softmax, or the name of a registered variant")
    position: Literal["learned", "rotary"] = Field("learned", description="position encoding")
    rope_theta: float = Field(10000.0, gt=0, description="base of the rotary frequencies")
    rope_scaling: RopeScaling | None = Field(None, description="stretching of rotary frequencies; unset: none")
    qkv_bias: bool = Field(True, description="biases on the query, key and value projections")
    out_bias: bool = Field(True, description="bias on the attention output projection")
    mlp_bias: bool = Field(True, description="biases in the MLP")
    qk_norm: bool = Field(False, description="RMSNorm over each head's queries and keys, as in Qwen-3")
    sliding_window: int | None = Field(None, description="tokens a position sees, its own included; unset: all")
    tie_word_embeddings: bool = Field(True, description="the output head uses the word embedding's weight")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout on embeddings and residual branches")
    attention_dropout: float | None = Field(None, description="dropout on attention weights; unset: as dropout")
    init_std: float = Field(0.02, gt=0, description="standard deviation of initial weights")

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def attention_dropout_rate(self) -> float:
        return self.dropout if self.attention_dropout is None else self.attention_dropout

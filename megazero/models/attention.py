"""Causal self-attention, with grouped key/value heads (Ainslie et al. 2023, arXiv:2305.13245)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn

from megazero.models import rotary
from megazero.models.config import ModelConfig
from megazero.models.context import Context
from megazero.models.layers import ProjectIn, ProjectOut
from megazero.models.norm import HeadNorm
from megazero.models.parts import attention_parts


class Attention(nn.Module):
    """Projections, positions and the weighted sum of values.

    How many heads there are follows from the projections' outputs, never from the config, so that the
    projections may be replaced by ones that give some of the heads. A variant overrides ``attend``, or
    ``combine`` where it registered further parts.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.dropout_rate = config.attention_dropout_rate
        self.qkv = ProjectIn(config.hidden_size, attention_parts(config), config.qkv_bias)
        self.q_norm = HeadNorm(config.head_size, config.norm_eps) if config.qk_norm else None
        self.k_norm = HeadNorm(config.head_size, config.norm_eps) if config.qk_norm else None
        self.out = ProjectOut(config.num_attention_heads * config.head_size, config.hidden_size, config.out_bias)

    def forward(self, x_TH: torch.Tensor, context: Context) -> torch.Tensor:
        """(T, H) → (T, H)."""
        heads = (self.heads(part, context.seq_length) for part in self.qkv(x_TH))
        y_BShD = self.combine(context, *heads)
        return self.out(rearrange(y_BShD, "b s h d -> (b s) (h d)"))

    def heads(self, x: torch.Tensor, seq_length: int) -> torch.Tensor:
        """(T, h·D) → (B, S, h, D), a view."""
        return rearrange(x, "(b s) (h d) -> b s h d", s=seq_length, d=self.head_size)

    def combine(
        self, context: Context, q_BShD: torch.Tensor, k_BSgD: torch.Tensor, v_BSgD: torch.Tensor
    ) -> torch.Tensor:
        """Projected heads, in the order of the parts → (B, S, h, D): norms, rotation, cache, then ``attend``."""
        if self.q_norm is not None and self.k_norm is not None:
            q_BShD, k_BSgD = self.q_norm(q_BShD), self.k_norm(k_BSgD)
        if context.cos is not None and context.sin is not None:
            shape = (-1, context.seq_length, 1, self.head_size)
            cos, sin = context.cos.view(shape), context.sin.view(shape)
            q_BShD, k_BSgD = rotary.rotate(q_BShD, cos, sin), rotary.rotate(k_BSgD, cos, sin)
        if context.cache is not None:
            k_BSgD, v_BSgD = context.cache.extend(k_BSgD, v_BSgD)
        y_BhSD = self.attend(q_BShD.transpose(1, 2), k_BSgD.transpose(1, 2), v_BSgD.transpose(1, 2), context)
        return y_BhSD.transpose(1, 2)

    def attend(
        self, q_BhSD: torch.Tensor, k_BgSD: torch.Tensor, v_BgSD: torch.Tensor, context: Context
    ) -> torch.Tensor:
        """Softmax attention of h query heads over g key/value heads, g dividing h → (B, h, S, D).

        With a cache there may be more keys than queries; ``context.mask`` then says which are seen.
        """
        return F.scaled_dot_product_attention(
            q_BhSD,
            k_BgSD,
            v_BgSD,
            attn_mask=context.mask,
            is_causal=context.mask is None,
            dropout_p=self.dropout_rate if self.training else 0.0,
            enable_gqa=q_BhSD.shape[1] != k_BgSD.shape[1],
        )

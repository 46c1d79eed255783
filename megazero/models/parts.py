"""A named part of a fused projection, and which parts a decoder's projections have. Pure Python, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.models import registry
from megazero.models.config import ModelConfig


@dataclass(frozen=True)
class Part:
    """``units`` runs of ``unit_size`` output features that go by one name, e.g. 8 heads of 64 called ``q``."""

    name: str
    units: int
    unit_size: int

    @property
    def size(self) -> int:
        return self.units * self.unit_size


def attention_parts(config: ModelConfig) -> tuple[Part, ...]:
    """Queries, keys and values, a unit per head; then what a registered attention variant adds."""
    standard = (
        Part("q", config.num_attention_heads, config.head_size),
        Part("k", config.kv_heads, config.head_size),
        Part("v", config.kv_heads, config.head_size),
    )
    return (*standard, *registry.extra_attention_parts(config))


def mlp_parts(config: ModelConfig) -> tuple[Part, ...]:
    """``up``, after ``gate`` where the activation is gated; a unit per inner feature."""
    names = ("gate", "up") if registry.is_gated(config.activation) else ("up",)
    return tuple(Part(name, config.ffn_size, 1) for name in names)

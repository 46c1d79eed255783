"""The listings of docs/change-the-model.md: short, complete, and right in one process."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

from megazero.errors import ConfigError
from megazero.models import registry
from megazero.models.attention import Attention
from megazero.models.config import ModelConfig
from megazero.models.context import build_context
from megazero.models.gpt import GPT
from megazero.models.mlp import MLP
from megazero.models.parameters import parameter_count, parameter_shapes
from megazero.models.parts import Part

PAGE = Path(__file__).parents[2] / "docs" / "change-the-model.md"
LISTINGS = dict(re.findall(r"```python title=(\S+)\n(.*?)```", PAGE.read_text(), re.DOTALL))
SIZES = dict(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=37,
    max_position_embeddings=16,
    position="rotary",
)


@pytest.fixture(autouse=True)
def listings_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each listing imported as a user's file is; their names are gone after the test."""
    monkeypatch.setattr(registry, "_activations", {})
    monkeypatch.setattr(registry, "_attentions", {})
    for title, code in LISTINGS.items():
        path = tmp_path / title
        path.write_text(code)
        spec = importlib.util.spec_from_file_location(f"listing_{path.stem}", path)
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def filled(module: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data.normal_(0, 0.3, generator=generator)
    return module


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def test_listings_are_short() -> None:
    assert LISTINGS.keys() == {"squared_relu.py", "geglu.py", "soft_capped.py", "gated.py"}
    for title, code in LISTINGS.items():
        assert len([line for line in code.splitlines() if line.strip()]) < 30, title


def test_activations() -> None:
    x = normal(5, 32)
    mlp = filled(MLP(ModelConfig(**SIZES, activation="squared_relu")))
    inner = F.linear(x, mlp.inner.weight, mlp.inner.bias).clamp(min=0) ** 2
    torch.testing.assert_close(mlp(x), F.linear(inner, mlp.down.weight, mlp.down.bias))

    mlp = filled(MLP(ModelConfig(**SIZES, activation="geglu")))
    gate, up = F.linear(x, mlp.inner.weight, mlp.inner.bias).chunk(2, dim=-1)
    inner = gate * torch.special.ndtr(gate) * up
    torch.testing.assert_close(mlp(x), F.linear(inner, mlp.down.weight, mlp.down.bias))


@pytest.mark.parametrize("window", [None, 3])
def test_soft_capped_attention_equals_gemma2s(window: int | None) -> None:
    config = ModelConfig(**SIZES, attention="soft_capped", sliding_window=window)
    attention = registry.attention_variant("soft_capped")(config).eval()
    context = build_context(config, 8, 2)
    q, k, v = 20 * normal(2, 4, 8, 8), normal(2, 2, 8, 8), normal(2, 2, 8, 8)
    query, key = torch.arange(8)[:, None], torch.arange(8)[None, :]
    seen = (key <= query) & (query - key < (window or 8))
    attention.num_key_value_groups = 2
    expected, _ = eager_attention_forward(
        attention, q, k, v, torch.where(seen, 0.0, float("-inf"))[None, None], scaling=8**-0.5, softcap=50.0
    )
    torch.testing.assert_close(attention.attend(q, k, v, context), expected.transpose(1, 2))


def test_gated_attention_is_the_default_with_a_gate() -> None:
    config = ModelConfig(**SIZES, attention="gated", qkv_bias=False)
    gated = filled(registry.attention_variant("gated")(config))
    plain = Attention(config.model_copy(update={"attention": "softmax"}))
    plain.qkv.weight.data, gate_weight = gated.qkv.weight.data.split([64, 32])
    plain.out.weight.data = torch.eye(32)
    plain.out.bias.data.zero_()
    x, context = normal(16, 32), build_context(config, 8, 2)
    heads = plain(x, context) * torch.sigmoid(x @ gate_weight.T)
    torch.testing.assert_close(gated(x, context), F.linear(heads, gated.out.weight, gated.out.bias))


def test_extra_parts_are_parameters() -> None:
    config, plain = ModelConfig(**SIZES, attention="gated"), ModelConfig(**SIZES)
    added = parameter_shapes(config).keys() - parameter_shapes(plain).keys()
    assert added == {f"layers.{i}.attention.output_gate.{kind}" for i in (0, 1) for kind in ("weight", "bias")}
    assert sum(p.numel() for p in GPT(config).parameters()) == parameter_count(config)


@pytest.mark.parametrize("attention", ["softmax", "soft_capped", "gated"])
def test_heads_may_be_computed_apart(attention: str) -> None:
    """Half of the heads on each of two ranks: outputs add up to the whole, with nothing else changed."""
    config = ModelConfig(**SIZES, attention=attention, out_bias=False, qk_norm=True)
    variant = Attention if attention == "softmax" else registry.attention_variant(attention)
    whole = filled(variant(config))
    x, context = normal(16, 32), build_context(config, 8, 2)
    total = torch.zeros(16, 32)
    for rank in range(2):
        half = variant(config)
        half.load_state_dict(whole.state_dict())
        parts = whole.qkv.parts
        half.qkv.parts = tuple(Part(p.name, p.units // 2, p.unit_size) for p in parts)
        for name in ("weight", "bias"):
            pieces = getattr(whole.qkv, name).split([p.size for p in parts])
            cut = torch.cat([piece.chunk(2)[rank] for piece in pieces])
            setattr(half.qkv, name, torch.nn.Parameter(cut))
        half.out.weight = torch.nn.Parameter(whole.out.weight.chunk(2, dim=1)[rank])
        total += half(x, context)
    torch.testing.assert_close(total, whole(x, context))


def test_unknown_and_taken_names() -> None:
    config = ModelConfig(**SIZES, activation="squred_relu", attention="gatd")
    problems = dict(registry.problems(config))
    assert "did you mean 'squared_relu'?" in problems["model.activation"]
    assert "did you mean 'gated'?" in problems["model.attention"]
    with pytest.raises(ConfigError, match=r"model\.attention.*did you mean 'gated'"):
        GPT(config)
    with pytest.raises(ConfigError, match=r"model\.activation.*'gelu' is built in"):
        registry.register_activation("gelu", F.gelu)
    with pytest.raises(ConfigError, match=r"model\.attention.*'softmax' is built in"):
        registry.register_attention("softmax", Attention)

"""Initial weights: distribution by name, and values that depend on seed and name only."""

from __future__ import annotations

import pytest
import torch

from megazero.models import init
from megazero.models.config import ModelConfig
from megazero.models.parameters import parameter_shapes

CONFIG = ModelConfig(
    num_layers=8,
    hidden_size=128,
    num_attention_heads=4,
    vocab_size=512,
    max_position_embeddings=256,
    qk_norm=True,
    activation="swiglu",
    tie_word_embeddings=False,
    init_std=0.03,
)


def draw(name: str, seed: int = 0) -> torch.Tensor:
    return init.draw(CONFIG, name, parameter_shapes(CONFIG)[name], seed, "cpu")


@pytest.mark.parametrize("name", [n for n in parameter_shapes(CONFIG) if not n.startswith("layers.") or ".5." in n])
def test_distribution(name: str) -> None:
    values = draw(name)
    assert values.dtype == torch.float32 and tuple(values.shape) == parameter_shapes(CONFIG)[name]
    if name.endswith(".bias"):
        assert (values == 0).all()
    elif values.dim() == 1:
        assert (values == 1).all()
    else:
        # GPT-2: 1/√(number of residual additions), 2 per layer.
        std = 0.03 / 4 if name.endswith(("attention.out.weight", "mlp.down.weight")) else 0.03
        assert values.std().item() == pytest.approx(std, rel=5 / (2 * values.numel()) ** 0.5)
        assert abs(values.mean().item()) < 5 * std / values.numel() ** 0.5
        assert 3.5 * std < values.abs().max() < 6.5 * std


def test_seed_and_name_decide() -> None:
    torch.manual_seed(1)
    first = draw("layers.3.attention.q.weight")
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert torch.equal(draw("layers.3.attention.q.weight"), first)
    assert torch.equal(torch.get_rng_state(), state)
    for other in (draw("layers.3.attention.q.weight", seed=1), draw("layers.2.attention.q.weight")):
        assert not torch.equal(other, first)
        assert abs(torch.corrcoef(torch.stack([first.flatten(), other.flatten()]))[0, 1]) < 0.05


def test_values_are_pinned() -> None:
    # A change here changes every run that is started anew from an old configuration.
    expected = torch.tensor([0.01237747, -0.00283481, 0.00522783, 0.00448611])
    torch.testing.assert_close(draw("layers.0.mlp.down.weight")[0, :4], expected, rtol=1e-5, atol=0)

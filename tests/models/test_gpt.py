"""The decoder cut into runs of layers, and the tied head."""

from __future__ import annotations

import pytest
import torch

from megazero.models import init
from megazero.models.config import ModelConfig
from megazero.models.context import build_context
from megazero.models.gpt import GPT

SIZES = dict(num_layers=5, hidden_size=32, num_attention_heads=4, vocab_size=37, max_position_embeddings=16)


def build(config: ModelConfig, **run) -> GPT:
    with torch.device("meta"):
        model = GPT(config, **run)
    model.to_empty(device="cpu")
    for name, parameter in model.named_parameters():
        # A tied copy is drawn as the tensor it is a copy of.
        source = "embedding.word.weight" if name == "head.weight" and config.tie_word_embeddings else name
        parameter.data.copy_(init.draw(config, source, tuple(parameter.shape), 0, "cpu"))
    return model.double()


@pytest.mark.parametrize("tied", [True, False])
def test_stages_in_a_row_are_the_whole(tied: bool) -> None:
    config = ModelConfig(**SIZES, tie_word_embeddings=tied)
    tokens, context = torch.arange(24) % 37, build_context(config, 12, 2)
    whole = build(config)
    expected = whole.head(whole(tokens, context))
    stages = [
        build(config, layers=range(2), last=False),
        build(config, layers=range(2, 2), first=False, last=False),
        build(config, layers=range(2, 5), first=False),
    ]
    x = tokens
    for stage in stages:
        x = stage(x, context)
    assert torch.equal(stages[-1].head(x), expected)
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    own_head = ["head.weight"] if tied else []
    assert sorted(names) == sorted([name for name, _ in whole.named_parameters()] + own_head)


def test_tied_head_is_one_parameter_wherever_it_moves() -> None:
    model = build(ModelConfig(**SIZES))
    assert model.head.weight is model.embedding.word.weight
    assert "head.weight" not in dict(model.named_parameters())
    untied = build(ModelConfig(**SIZES, tie_word_embeddings=False))
    assert not torch.equal(untied.head.weight, untied.embedding.word.weight)

"""torch.compile: a layer is one whole graph, the same one for every layer, with the eager layer's values."""

from __future__ import annotations

import pytest
import torch

from megazero.models import init
from megazero.models.config import ModelConfig
from megazero.models.context import build_context
from megazero.models.dropout import Dropout, layer_keys
from megazero.models.gpt import GPT, layer_context

SIZES = dict(num_layers=3, hidden_size=32, num_attention_heads=4, vocab_size=37, max_position_embeddings=32)
CONFIGS = {
    "gpt2-dropout": ModelConfig(**SIZES, dropout=0.2, attention_dropout=0.0),
    "llama": ModelConfig(**SIZES, num_key_value_heads=2, position="rotary", norm="rmsnorm", activation="swiglu"),
    "qwen3-window": ModelConfig(**SIZES, position="rotary", norm="rmsnorm", qk_norm=True, sliding_window=3),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_layers_share_one_full_graph(name: str) -> None:
    config = CONFIGS[name]
    gpt = GPT(config)
    for path, parameter in gpt.named_parameters():
        parameter.data.copy_(init.draw(config, path, tuple(parameter.shape), 0, "cpu"))
    graphs = []

    def count(graph: torch.fx.GraphModule, _inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    layer_forward = torch.compile(type(gpt.layers["0"]).forward, fullgraph=True, backend=count, dynamic=False)
    x = torch.randn(24, 32, generator=torch.Generator().manual_seed(0))
    for samples in (torch.tensor([0, 1]), torch.tensor([8, 5])):
        context = build_context(config, 12, 2, samples=samples)
        for index, layer in gpt.layers.items():
            keys = None if context.dropout_key is None else layer_keys(context.dropout_key, config.num_layers)
            own = layer_context(context, int(index), keys)
            assert torch.equal(layer_forward(layer, x, own), layer(x, own))
    assert len(graphs) == 1


@pytest.mark.whole
def test_dropout_compiled_by_inductor_keeps_the_masks() -> None:
    config = CONFIGS["gpt2-dropout"]
    module = Dropout(0.2)
    key = build_context(config, 12, 2, samples=torch.tensor([0, 1])).dropout_key
    x = torch.ones(24, 32)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(module, fullgraph=True)(x, key), module(x, key))

"""A copy of an engine's model is a model of its own, whatever the engine has put around the parts of it."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable

import pytest
import torch

from megazero.config import Config
from megazero.models.context import build_context
from megazero.models.gpt import GPT
from tests.distributed.runs import TokenSource, fused, make_engine, make_whole, random_weights, settings

SIZES = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 37, "tie_word_embeddings": False}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize(
    "train",
    [
        {},
        {"recompute": "selective"},
        {"recompute": "full", "offload_activations": True},
        {"compile": True},
        {"compile": True, "recompute": "full"},
    ],
)
def test_a_copy_computes_with_its_own_parameters(
    copied: Callable[[GPT], GPT], train: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    tree = settings(SIZES, train=train)
    architecture = Config.from_dict(tree).model.architecture
    weights = random_weights(architecture)
    others = {name: value.flip(0) for name, value in weights.items()}
    context = build_context(architecture, 12, 2)
    fields = TokenSource(SIZES["vocab_size"], 12).fields
    tokens, targets = fields["tokens"][:2, :-1].flatten(), fields["tokens"][:2, 1:].flatten()
    plain = GPT(architecture)
    plain.load_state_dict(fused(others))
    wanted = plain(tokens, context)
    wanted.square().sum().backward()
    with make_engine(tree, weights) as engine:
        make_whole(engine.stage.sharded)
        model = engine.stage.model
        twin = copied(model)
        with torch.no_grad():
            for name, parameter in twin.named_parameters():
                value = fused(others)[name]
                parameter[: len(value)] = value
        found = twin(tokens, context)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        found.square().sum().backward()
        gradients = dict(twin.named_parameters())
        for name, parameter in plain.named_parameters():
            if parameter.grad is not None:
                ours = gradients[name].grad[: len(parameter)]
                torch.testing.assert_close(ours, parameter.grad, rtol=1e-4, atol=1e-4, msg=name)
        assert all(parameter.grad is None for parameter in model.parameters())
        loss = torch.nn.functional.cross_entropy(plain.head(wanted), targets, reduction="sum")
        torch.testing.assert_close(twin.head(found, targets, torch.ones(len(targets))), loss, rtol=1e-5, atol=1e-5)

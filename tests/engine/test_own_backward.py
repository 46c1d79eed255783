"""A backward through the engine's model that is no step's: its gradients are on the parameters, and in no step."""

from __future__ import annotations

import pytest
import torch

from megazero.config import Config
from megazero.models.config import ModelConfig
from megazero.models.context import Context, build_context
from megazero.models.gpt import GPT
from tests.distributed.runs import (
    Outcome,
    TokenSource,
    assemble,
    assert_close,
    fused,
    make_engine,
    make_whole,
    pieces_of,
    plain_loop,
    random_weights,
    settings,
)

SIZES = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 37, "tie_word_embeddings": False}


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_a_backward_between_steps_is_no_steps(schedule: str) -> None:
    tree = settings(SIZES, parallel={"schedule": schedule})
    source = TokenSource(SIZES["vocab_size"], 12)
    architecture = Config.from_dict(tree).model.architecture
    weights = random_weights(architecture)
    context = build_context(architecture, 12, 2)
    tokens = source.fields["tokens"][:2, :-1].flatten()
    with make_engine(tree, weights) as engine:
        model, metrics = engine.stage.model, []
        for step in range(3):
            make_whole(engine.stage.sharded)
            for times in (1, 2):
                model(tokens, context).square().sum().backward()
                if step == 0:
                    check_gradients(model, weights, architecture, tokens, context, times)
            model.zero_grad()
            metrics.append(engine.train_batch(source))
        numbers = [(float(m.loss), float(m.grad_norm), m.lr) for m in metrics]
        found = Outcome(*map(list, zip(*numbers)), assemble([pieces_of(engine)]))
    assert_close(found, plain_loop(tree, source, weights))


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_gradients_asked_for_between_steps_are_given_and_left_nowhere(schedule: str) -> None:
    """As often as somebody asks for them."""
    tree = settings(SIZES, parallel={"schedule": schedule})
    architecture = Config.from_dict(tree).model.architecture
    weights = random_weights(architecture)
    context = build_context(architecture, 12, 2)
    tokens = TokenSource(SIZES["vocab_size"], 12).fields["tokens"][:2, :-1].flatten()
    plain = GPT(architecture)
    plain.load_state_dict(fused(weights))
    wanted = torch.autograd.grad(plain(tokens, context).square().sum(), list(plain.layers.parameters()))
    with make_engine(tree, weights) as engine:
        model = engine.stage.model
        make_whole(engine.stage.sharded)
        loss = model(tokens, context).square().sum()
        for _ in range(2):
            found = torch.autograd.grad(loss, list(model.layers.parameters()), retain_graph=True)
            for ours, theirs in zip(found, wanted, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
            assert all(parameter.grad is None for parameter in model.parameters())
        for times in (1, 2):
            loss.backward(retain_graph=True)
            check_gradients(model, weights, architecture, tokens, context, times)


def check_gradients(
    model: GPT, weights: dict, architecture: ModelConfig, tokens: torch.Tensor, context: Context, times: int
) -> None:
    plain = GPT(architecture)
    plain.load_state_dict(fused(weights))
    plain(tokens, context).square().sum().backward()
    ours = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            wanted = times * parameter.grad
            torch.testing.assert_close(ours[name].grad[: len(wanted)], wanted, rtol=1e-4, atol=1e-4, msg=name)

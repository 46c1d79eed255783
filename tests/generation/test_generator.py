"""Generation on one process: transformers' own tokens, each computed once, whoever else is in the batch."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from megazero.errors import ConfigError, DivergenceError
from megazero.generation import Generator, Sampling
from megazero.generation import cache as cache_module
from megazero.layout import Layout
from megazero.models import init, registry
from megazero.models.attention import Attention
from megazero.models.config import ModelConfig
from megazero.models.context import build_context
from megazero.models.gpt import GPT
from megazero.topology import Topology
from tests.generation import models

GREEDY = Sampling(temperature=0)
SIZES = dict(num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=37, max_position_embeddings=64)


@cache
def plain(**fields: object) -> GPT:
    """Our model alone, without anything of a layout; weights large enough for tokens to depend on the context."""
    config = ModelConfig(**{**SIZES, **fields})
    gpt = GPT(config)
    for name, parameter in gpt.named_parameters():
        parameter.data.copy_(
            init.draw(config, name, tuple(parameter.shape), 0, "cpu") * (10 if parameter.dim() > 1 else 1)
        )
    return gpt.eval()


def generator(gpt: GPT) -> Generator:
    return Generator(gpt, Topology(Layout(), 0, torch.device("cpu")))


def recomputed(gpt: GPT, prompt: list[int], new_tokens: int) -> list[int]:
    """The greedy continuation without any cache."""
    tokens = list(prompt)
    for _ in range(new_tokens):
        hidden = gpt(torch.tensor(tokens), build_context(gpt.config, len(tokens), 1))
        tokens.append(int(gpt.head(hidden[-1]).argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("name", [name for name in models.MODELS if name != "llama-one-kv-head"])  # see test_layouts
def test_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """A batch of unequal prompts, past a window and the original length of stretched positions; theirs each alone."""
    model, prompts = models.build(name), models.prompts([1, 5, 12])
    model.save_pretrained(tmp_path)
    wanted = models.expected(model, prompts, 64)
    assert len({token for tokens in wanted for token in tokens}) > 10
    assert models.open_generator(tmp_path).generate(prompts, 64, GREEDY) == wanted


def test_every_token_goes_through_the_model_once() -> None:
    gpt, counts = plain(), []
    handle = gpt.layers["1"].register_forward_hook(lambda module, inputs, output: counts.append(len(output)))
    generator(gpt).generate([[1, 2, 3], [4, 5]], 10, GREEDY)
    handle.remove()
    assert counts == [2 * 3] + [2] * 9


def test_the_cache_grows_with_the_text_not_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of 10^9 tokens would be terabytes; that growing loses nothing is held against a model without cache."""
    gpt, prompts = plain(position="rotary", sliding_window=5), [[1, 2, 3], [4, 5]]
    monkeypatch.setattr(cache_module, "_MARGIN", 1)
    seen = []

    def on_token(index: int, token: int, last: bool) -> bool:
        seen.append(token)
        return len(seen) >= 40

    found = generator(gpt).generate(prompts, 10**9, GREEDY, on_token=on_token)
    assert found == [recomputed(gpt, prompt, len(new)) for prompt, new in zip(prompts, found)]
    assert [len(new) for new in found] == [21, 20]


def test_a_row_that_ends_leaves_the_others_as_they_are() -> None:
    gpt, prompts = plain(position="rotary", sliding_window=5), [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]]
    whole = [recomputed(gpt, prompt, 12) for prompt in prompts]
    stop = whole[0][2]
    wanted = [tokens[: tokens.index(stop) + 1] if stop in tokens else tokens for tokens in whole]
    assert len({len(tokens) for tokens in wanted}) > 1
    assert generator(gpt).generate(prompts, 12, GREEDY, stop_tokens=[stop]) == wanted
    seen: list[list[int]] = [[] for _ in prompts]
    lasts = []

    def on_token(index: int, token: int, last: bool) -> bool:
        seen[index].append(token)
        lasts.append(last)
        return index == 1 and len(seen[1]) == 4

    found = generator(gpt).generate(prompts, 12, GREEDY, on_token=on_token)
    assert found == seen == [whole[0], whole[1][:4], whole[2], whole[3]]
    assert sum(lasts) == 3


def test_a_drawn_continuation_depends_on_its_seed_and_prompt_alone() -> None:
    gpt = plain(num_key_value_heads=2, position="rotary")
    prompts = [[1, 2, 3], [4, 5], [4, 5], [6, 7, 8, 9]]
    sampling = Sampling(temperature=1.3, top_k=20, top_p=0.95, seed=5)
    together = generator(gpt).generate(prompts, 20, sampling)
    assert generator(gpt).generate(prompts, 20, sampling, batch_size=1) == together
    assert generator(gpt).generate(prompts, 20, sampling, batch_size=3) == together
    assert together[1] != together[2], "two prompts alike must not give the same text"
    assert generator(gpt).generate(prompts, 20, Sampling(1.3, 20, 0.95, seed=6)) != together
    # Continued from where it was, it goes on as it would have.
    halves = generator(gpt).generate([p + new[:10] for p, new in zip(prompts, together)], 10, sampling)
    assert halves == [new[10:] for new in together]


def test_dropout_is_off_and_the_mode_comes_back() -> None:
    without, gpt = plain(), GPT(ModelConfig(**SIZES, dropout=0.5))
    gpt.load_state_dict(without.state_dict())
    gpt.train()
    gpt.layers["0"].eval()
    wanted = generator(without).generate([[1, 2, 3]], 20, GREEDY)
    assert generator(gpt).generate([[1, 2, 3]], 20, GREEDY) == wanted
    assert gpt.training and gpt.layers["1"].mlp_dropout.training
    assert "forward" not in vars(gpt.head)


def test_ids_beyond_the_tokenizers_are_never_chosen() -> None:
    gpt = plain()
    free = generator(gpt).generate([[1, 2, 3]], 30, Sampling(temperature=2.0))[0]
    bound = generator(gpt).generate([[1, 2, 3]], 30, Sampling(temperature=2.0), vocab_size=10)[0]
    assert max(free) >= 10 > max(bound)


def test_weights_that_are_not_finite_are_an_error() -> None:
    gpt = GPT(ModelConfig(**SIZES))
    gpt.load_state_dict(plain().state_dict())
    with torch.no_grad():
        gpt.final_norm.weight[3] = torch.nan
    for sampling in (GREEDY, Sampling()):
        with pytest.raises(DivergenceError, match="prompt 1: the logits after 2 tokens are not finite"):
            generator(gpt).generate([[1, 2]], 5, sampling)


class Written(Attention):
    """A variant with scores of its own, as docs/change-the-model.md shows."""

    def attend(self, q, k, v, context):
        visible = context.mask
        if visible is None:
            visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        scores = 5 * torch.tanh(q @ k.transpose(-2, -1) / (5 * self.head_size**0.5))
        return scores.masked_fill(~visible, float("-inf")).softmax(-1) @ v


class Uncached(Attention):
    def combine(self, context, q, k, v):
        return self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), context).transpose(1, 2)


@pytest.fixture
def variants():
    registry.register_attention("written", Written)
    registry.register_attention("uncached", Uncached)
    yield
    registry._attentions.clear()


def test_a_registered_attention_is_cached_too(variants: None) -> None:
    gpt = plain(attention="written", position="rotary")
    assert generator(gpt).generate([[1, 2, 3]], 12, GREEDY) == [recomputed(gpt, [1, 2, 3], 12)]
    with pytest.raises(ConfigError, match="model.attention: uncached: its `combine` must call"):
        generator(plain(attention="uncached")).generate([[1, 2, 3]], 2, GREEDY)


@pytest.mark.parametrize(
    "fields, prompts, new, message",
    [
        ({}, [[1], []], 4, "prompt 2: has no tokens"),
        ({}, [], 4, "prompt: there is none"),
        ({}, [[1]], 0, "max_new_tokens: 0 must be at least 1"),
        ({}, [[1, 37]], 4, "prompt 1: token 37 is outside the vocabulary of 37"),
        ({}, [[1, -1]], 4, "prompt 1: token -1 is outside"),
        ({}, [[1] * 64], 4, "prompt 1: its 64 tokens fill the model's 64 positions"),
        ({}, [[1], [1] * 60], 5, "prompt 2: its 60 tokens and 5 new ones are more than .* ask for at most 4"),
    ],
)
def test_what_cannot_be_continued_is_named(fields: dict, prompts: list, new: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        generator(plain(**fields)).generate(prompts, new)


def test_positions_end_where_they_are_learned_only() -> None:
    assert len(generator(plain()).generate([[1] * 60], 4)[0]) == 4
    assert len(generator(plain(position="rotary")).generate([[1] * 60], 8)[0]) == 8


def test_half_precision_weights_are_half_as_large(tmp_path: Path) -> None:
    from megazero.convert import open_weights
    from megazero.generation import build_generator, inference_config
    from megazero.launch.environment import ProcessEnvironment

    models.build("qwen2").save_pretrained(tmp_path)
    weights = open_weights(tmp_path)
    built = build_generator(weights, inference_config(weights.config, 1, 1, 1), ProcessEnvironment(0, 0, 1), "bf16")
    assert {parameter.dtype for parameter in built.model.parameters()} == {torch.bfloat16}
    assert isinstance(built.model, nn.Module) and not any(p.requires_grad for p in built.model.parameters())
    assert built.model.head.weight is built.model.embedding.word.weight
    assert len(built.generate([[1, 2]], 3)[0]) == 3

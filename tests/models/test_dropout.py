"""The keyed masks: right statistics, a function of the token alone, unrelated elsewhere."""

from __future__ import annotations

import pytest
import torch

from megazero.models.config import ModelConfig
from megazero.models.context import build_context
from megazero.models.dropout import Dropout, Site, derive_key, keep_mask, layer_keys, token_keys
from megazero.models.gpt import GPT

TOKENS, FEATURES = 512, 384


def keys(first: int = 0, count: int = TOKENS, seed: int = 0) -> torch.Tensor:
    return token_keys(torch.arange(first, first + count), seed)


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_rate_holds_overall_and_per_token_and_feature(rate: float) -> None:
    keep = keep_mask(keys(), FEATURES, rate).double()
    deviation = (rate * (1 - rate)) ** 0.5
    assert abs(keep.mean() - (1 - rate)) < 4 * deviation / (TOKENS * FEATURES) ** 0.5
    for dim, count in ((0, TOKENS), (1, FEATURES)):
        z = (keep.mean(dim) - (1 - rate)) / (deviation / count**0.5)
        # Independent draws give standard normal scores: their spread is 1, their largest below 5.
        assert z.abs().max() < 5
        assert z.std().item() == pytest.approx(1, abs=0.15)


def test_output_has_the_inputs_mean_and_the_variance_of_dropout() -> None:
    x = torch.full((TOKENS, FEATURES), 2.0)
    y = Dropout(0.25).train()(x, keys())
    assert y.unique().tolist() == pytest.approx([0.0, 2 / 0.75])
    assert y.mean().item() == pytest.approx(2.0, abs=0.02)
    assert y.var().item() == pytest.approx(4 * 0.25 / 0.75, abs=0.02)


def test_half_precision_stays_so() -> None:
    y = Dropout(0.5)(torch.ones(8, 16, dtype=torch.bfloat16), keys(count=8))
    assert y.dtype == torch.bfloat16 and set(y.unique().tolist()) == {0.0, 2.0}


def test_evaluation_and_rate_zero_change_nothing() -> None:
    x = torch.randn(4, 8)
    assert Dropout(0.5).eval()(x, None) is x
    assert Dropout(0.0).train()(x, None) is x


def test_neighbouring_tokens_and_features_are_uncorrelated() -> None:
    keep = keep_mask(keys(), FEATURES, 0.5).double() * 2 - 1
    bound = 4.5 / (TOKENS * FEATURES) ** 0.5
    for shift in (1, 2, 3, 4, 8, 16, 64, 128, 256):
        assert (keep[shift:] * keep[:-shift]).mean().abs() < bound * 1.5
        assert (keep[:, shift:] * keep[:, :-shift]).mean().abs() < bound * 2


def test_mask_is_the_same_in_any_slice() -> None:
    whole = keep_mask(keys(), FEATURES, 0.3)
    for start, end in ((0, 100), (100, 101), (129, 512)):
        assert torch.equal(keep_mask(keys()[start:end], FEATURES, 0.3), whole[start:end])
    # The same sequences in another micro-batch.
    config = ModelConfig(dropout=0.1)
    together = build_context(config, 16, 4, samples=torch.tensor([5, 9, 2, 7])).dropout_key
    alone = build_context(config, 16, 1, samples=torch.tensor([2])).dropout_key
    assert torch.equal(together[32:48], alone)


def agreement(a: torch.Tensor, b: torch.Tensor) -> float:
    return (keep_mask(a, FEATURES, 0.5) == keep_mask(b, FEATURES, 0.5)).double().mean().item()


def test_masks_of_layers_sites_samples_and_seeds_are_unrelated() -> None:
    base = keys()
    others = {
        "samples": keys(first=TOKENS),
        "far samples": keys(first=2**40),
        "seed": keys(seed=1),
        "high seed": keys(seed=2**32),
        **{f"number {n}": derive_key(base, n) for n in (0, 1, 2, 95)},
        "layer then site": derive_key(derive_key(base, 1), 2),
        "site then layer": derive_key(derive_key(base, 2), 1),
    }
    drawn = {"base": base, **others}
    for first in drawn:
        for second in drawn:
            if first < second:
                assert agreement(drawn[first], drawn[second]) == pytest.approx(0.5, abs=0.01), (first, second)


def test_derived_keys_are_one_to_one() -> None:
    numbers = torch.cat([torch.arange(100_000), 2**32 + torch.arange(1000), -1 - torch.arange(1000)])
    assert derive_key(numbers, 3).unique().numel() == numbers.numel()


def test_layers_keys_are_those_of_their_numbers_and_sites() -> None:
    base = keys()
    found = layer_keys(base, 3)
    wanted = [[derive_key(derive_key(base, i), site) for site in (Site.ATTENTION, Site.MLP)] for i in range(3)]
    assert torch.equal(found, torch.stack([torch.stack(sites) for sites in wanted]))


def test_gpt_uses_another_mask_per_layer_and_site(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig(
        num_layers=2, hidden_size=16, num_attention_heads=2, vocab_size=11, max_position_embeddings=8, dropout=0.5
    )
    gpt, masks = GPT(config), []
    for parameter in gpt.parameters():
        torch.nn.init.normal_(parameter)
    forward = Dropout.forward

    def noting(self: Dropout, x_TH: torch.Tensor, key_T: torch.Tensor | None) -> torch.Tensor:
        masks.append(forward(self, torch.ones(16, 16), key_T))
        return forward(self, x_TH, key_T)

    monkeypatch.setattr(Dropout, "forward", noting)
    gpt(torch.arange(16) % 11, build_context(config, 8, 2, samples=torch.arange(2)))
    assert len(masks) == len({tuple(mask.flatten().tolist()) for mask in masks}) == 5


def test_a_run_of_layers_masks_as_the_whole_model_does() -> None:
    config = ModelConfig(
        num_layers=3,
        hidden_size=16,
        num_attention_heads=2,
        vocab_size=11,
        max_position_embeddings=8,
        dropout=0.3,
        attention_dropout=0.0,
    )
    whole = GPT(config)
    for parameter in whole.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    context = build_context(config, 8, 2, samples=torch.tensor([3, 8]))
    tokens = torch.arange(16) % 11
    x = tokens
    for layers, first, last in (([0], True, False), ([1, 2], False, True)):
        stage = GPT(config, layers, first, last)
        stage.load_state_dict({name: p for name, p in whole.state_dict().items() if name in stage.state_dict()})
        x = stage(x, context)
    assert torch.equal(x, whole(tokens, context))

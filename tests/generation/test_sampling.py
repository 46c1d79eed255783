"""Which tokens may be drawn and how often: transformers' own filters, and the frequencies of many draws."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from megazero.errors import ConfigError
from megazero.generation import Sampling
from megazero.generation.sampling import choose, probabilities, uniform

LOGITS = torch.randn(5, 50, generator=torch.Generator().manual_seed(0)) * 3


@pytest.mark.parametrize(
    "temperature, top_k, top_p",
    [
        (1.0, None, 1.0),
        (0.7, None, 1.0),
        (2.5, 7, 1.0),
        (1.0, 1, 1.0),
        (1.0, 60, 1.0),
        (1.3, None, 0.6),
        (0.9, 12, 0.8),
    ],
)
def test_probabilities_are_those_of_transformers(temperature: float, top_k: int | None, top_p: float) -> None:
    scores = TemperatureLogitsWarper(temperature)(None, LOGITS.double())
    if top_k is not None:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    found = probabilities(LOGITS, Sampling(temperature, top_k, top_p))
    assert torch.equal(found == 0, scores == -math.inf)
    torch.testing.assert_close(found, scores.softmax(-1), rtol=0, atol=1e-7)


def test_the_likeliest_stays_however_small_top_p_is() -> None:
    found = probabilities(LOGITS, Sampling(top_p=1e-9))
    assert torch.equal(found.argmax(-1), LOGITS.argmax(-1)) and (found.max(-1).values == 1).all()


def test_a_tiny_temperature_is_greedy() -> None:
    numbers = [0.0, 0.3, 0.6, 0.9, 1 - 2**-48]
    for temperature in (0.0, 1e-300, 1e-40):
        assert torch.equal(choose(LOGITS, Sampling(temperature), numbers), LOGITS.argmax(-1))


def test_draws_are_as_frequent_as_they_are_probable() -> None:
    """χ² of 4000 draws by successive positions, 9 degrees of freedom: 27.9 is the 99.9 % point."""
    logits, draws = LOGITS[:1, :10] / 2, 4000
    chosen = choose(logits.expand(draws, -1), Sampling(), [uniform(1, 2, position) for position in range(draws)])
    expected = logits[0].double().softmax(-1) * draws
    assert ((chosen.bincount(minlength=10) - expected) ** 2 / expected).sum() < 27.9


def test_no_token_of_probability_zero_at_the_ends_of_the_range() -> None:
    logits = torch.tensor([[-math.inf, 1.0, -math.inf, 2.0, -math.inf]]).nan_to_num(neginf=-1e30)
    for number, token in ((0.0, 1), (1 - 2**-48, 3)):
        assert choose(logits, Sampling(), [number]).tolist() == [token]


def test_random_numbers_differ_in_every_argument() -> None:
    numbers = {uniform(*key) for key in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (1, 1, 0), (-1, 0, 0)]}
    assert len(numbers) == 7 and all(0 <= number < 1 for number in numbers)
    # The same on every machine and in every version: drawn texts are reproducible.
    assert uniform(0, 0, 0) == 0.574506114188722


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"temperature": -0.5}, "temperature: -0.5 must be at least 0"),
        ({"temperature": math.nan}, "temperature: nan must be"),
        ({"temperature": math.inf}, "temperature: inf must be"),
        ({"top_k": 0}, "top_k: 0 must be at least 1"),
        ({"top_p": 0.0}, "top_p: 0 must be above 0"),
        ({"top_p": 1.5}, "top_p: 1.5 must be above 0 and at most 1"),
        ({"temperature": -1.0, "top_p": -1.0}, "temperature: .*\ntop_p: "),
    ],
)
def test_settings_out_of_range_are_named(fields: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sampling(**fields)

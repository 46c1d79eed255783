"""Which layers each stage holds."""

from __future__ import annotations

import itertools
import random

import pytest

from megazero.errors import ConfigError
from megazero.models.config import ModelConfig
from megazero.pipeline.partition import given_partition, layer_costs, partition_layers


def counts(ranges: list[range]) -> list[int]:
    return [len(r) for r in ranges]


def brute_force(costs: list[float], first: float, last: float, stages: int) -> float:
    """The least possible cost of the dearest stage, over all contiguous partitions."""
    best = float("inf")
    for cuts in itertools.combinations(range(1, len(costs)), stages - 1):
        edges = [0, *cuts, len(costs)]
        sums = [sum(costs[a:b]) for a, b in itertools.pairwise(edges)]
        sums[0] += first
        sums[-1] += last
        best = min(best, max(sums))
    return best


def dearest(ranges: list[range], costs: list[float], first: float, last: float) -> float:
    sums = [sum(costs[i] for i in r) for r in ranges]
    sums[0] += first
    sums[-1] += last
    return max(sums)


@pytest.mark.parametrize("layers, stages", [(30, 4), (80, 16), (7, 2), (1, 1), (126, 16), (5, 5)])
def test_every_layer_is_on_exactly_one_stage(layers: int, stages: int) -> None:
    costs = layer_costs(ModelConfig(num_layers=layers), 1024)
    ranges = partition_layers(costs.layers, costs.first, costs.last, stages)
    assert len(ranges) == stages and all(len(r) >= 1 for r in ranges)
    assert [i for r in ranges for i in r] == list(range(layers))


def test_optimal_against_brute_force() -> None:
    draw = random.Random(1)
    for _ in range(150):
        layers = draw.randint(1, 9)
        stages = draw.randint(1, layers)
        costs = [float(draw.choice([1, 2, 3, 5, 8, 0])) for _ in range(layers)]
        first, last = float(draw.randint(0, 9)), float(draw.randint(0, 9))
        ranges = partition_layers(costs, first, last, stages)
        assert dearest(ranges, costs, first, last) == brute_force(costs, first, last, stages)


def test_equal_layers_are_spread_evenly_and_early_stages_get_fewer() -> None:
    assert counts(partition_layers([1.0] * 30, 0, 0, 4)) == [7, 7, 8, 8]
    assert counts(partition_layers([1.0] * 80, 0, 0, 16)) == [5] * 16
    assert counts(partition_layers([1.0] * 7, 0, 0, 2)) == [3, 4]
    # 0.1 summed in floating point would break these ties by rounding.
    assert counts(partition_layers([0.1] * 30, 0, 0, 4)) == [7, 7, 8, 8]


def test_head_and_embedding_count() -> None:
    assert counts(partition_layers([1.0] * 8, 0, 2, 2)) == [5, 3]
    assert counts(partition_layers([1.0] * 8, 4, 0, 2)) == [2, 6]


def test_costs_are_the_model_flops_formula() -> None:
    """GPT-3 175B: 6 per matmul parameter and 6 · L · h · s of attention for forward and backward together."""
    model = ModelConfig(num_layers=96, hidden_size=12288, num_attention_heads=96, vocab_size=50257)
    costs = layer_costs(model, 2048)
    assert 3 * sum(costs.layers) == 6 * 96 * 12 * 12288**2 + 6 * 96 * 12288 * 2048
    assert 3 * costs.last == 6 * 12288 * 50257


def test_costs_of_a_grouped_query_swiglu_model() -> None:
    """Llama-3 8B: 218,103,808 matmul weights per layer."""
    model = ModelConfig(
        num_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        ffn_hidden_size=14336,
        activation="swiglu",
        position="rotary",
    )
    assert layer_costs(model, 8192).layers[0] == 2 * 218_103_808 + 2 * 4096 * 8192


def test_sliding_window_shortens_attention() -> None:
    """The mean over positions of the tokens seen, min(t, w) for t in (0, s]: w - w²/2s."""
    whole = layer_costs(ModelConfig(), 1024).layers[0]
    windowed = layer_costs(ModelConfig(sliding_window=256), 1024).layers[0]
    assert whole - windowed == 4 * 768 * (512 - (256 - 32))
    assert layer_costs(ModelConfig(sliding_window=4096), 1024).layers[0] == whole


def test_given_partition() -> None:
    assert given_partition([2, 3, 1], 6) == [range(0, 2), range(2, 5), range(5, 6)]
    with pytest.raises(ConfigError, match="parallel.partition: .*sums to 6 layers, the model has 7"):
        given_partition([2, 3, 1], 7)
    with pytest.raises(ConfigError, match="parallel.partition: every stage needs at least 1"):
        given_partition([7, 0], 7)


def test_more_stages_than_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="parallel.pp: 4 stages cannot share 3 layers; use at most 3"):
        partition_layers([1.0] * 3, 0, 0, 4)

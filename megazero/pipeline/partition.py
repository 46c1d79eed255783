"""Which layers each pipeline stage holds: balanced by cost, or as given."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

from megazero.errors import ConfigError
from megazero.models.parts import attention_parts, mlp_parts

if TYPE_CHECKING:
    from megazero.models.config import ModelConfig


class LayerCosts(NamedTuple):
    """Forward FLOPs per token: ``layers`` one entry each, ``first`` and ``last`` what only the end stages do."""

    layers: list[int]
    first: int
    last: int


def layer_costs(model: ModelConfig, seq_length: int) -> LayerCosts:
    """FLOPs per token of every layer, of the embedding (a row read and added per table) and of the head.

    A matmul counts 2 per weight; causal attention, half of the square: 2 · heads · head_size · seq_length. A sliding
    window of w tokens shortens the mean context from s / 2 to w - w² / 2s. Backward costs twice the forward
    everywhere, so it changes no balance.
    """
    hidden, query = model.hidden_size, model.num_attention_heads * model.head_size
    attention_weights = hidden * (sum(part.size for part in attention_parts(model)) + query)
    mlp_weights = hidden * (sum(part.size for part in mlp_parts(model)) + model.ffn_size)
    window = min(model.sliding_window or seq_length, seq_length)
    context = window - window * window / (2 * seq_length)
    layer = 2 * (attention_weights + mlp_weights) + round(4 * query * context)
    tables = 2 if model.position == "learned" else 1
    return LayerCosts([layer] * model.num_layers, tables * hidden, 2 * hidden * model.vocab_size)


_Best = tuple[int, tuple[int, ...]]


def partition_layers(costs: Sequence[float], first_cost: float, last_cost: float, stages: int) -> list[range]:
    """The contiguous partition whose dearest stage is cheapest; every stage has a layer at least.

    ``first_cost`` is added to the first stage, ``last_cost`` to the last. Among equals the one with the least sum of
    squares, and among those the one with fewer layers early, where 1F1B holds the most activations. Exact
    arithmetic, so the result is the same on every rank. Raises ConfigError where layers are fewer than stages.
    """
    num_layers = len(costs)
    if not 1 <= stages <= num_layers:
        raise ConfigError.single(
            "parallel.pp", f"{stages} stages cannot share {num_layers} layers; use at most {max(num_layers, 1)}"
        )
    prefix = _prefix_sums(costs, first_cost, last_cost)
    # The dearest stage is settled first: without that bound, a best rest would not always belong to a best whole.
    limit = _least_maximum(prefix, stages)
    # best[i]: (sum of squares, counts) of the best way to give layers i and later to the stages from `stage` on.
    best: list[_Best | None] = [None] * num_layers + [(0, ())]
    for stage in reversed(range(stages)):
        improved: list[_Best | None] = [None] * (num_layers + 1)
        for start in range(stage, num_layers):
            candidates = []
            for end in range(start + 1, num_layers + 1):
                cost = _stage_cost(prefix, start, end)
                if cost > limit:
                    break
                rest = best[end]
                if rest is not None:
                    candidates.append((cost * cost + rest[0], (end - start, *rest[1])))
            improved[start] = min(candidates, default=None)
        best = improved
    assert best[0] is not None
    return _ranges(best[0][1])


def given_partition(counts: Sequence[int], num_layers: int) -> list[range]:
    """The partition with ``counts[s]`` layers on stage s. Raises ConfigError where it does not fit the model."""
    if any(count < 1 for count in counts):
        raise ConfigError.single("parallel.partition", f"every stage needs at least 1 layer, got {list(counts)}")
    if sum(counts) != num_layers:
        raise ConfigError.single(
            "parallel.partition",
            f"{list(counts)} sums to {sum(counts)} layers, the model has {num_layers} (model.num_layers)",
        )
    return _ranges(counts)


def _ranges(counts: Sequence[int]) -> list[range]:
    ranges, start = [], 0
    for count in counts:
        ranges.append(range(start, start + count))
        start += count
    return ranges


def _prefix_sums(costs: Sequence[float], first_cost: float, last_cost: float) -> list[int]:
    """Prefix sums in whole numbers of the costs' common unit, the ends' extras joined to the end layers."""
    exact = [Fraction(cost) for cost in costs]
    exact[0] += Fraction(first_cost)
    exact[-1] += Fraction(last_cost)
    unit = math.lcm(*(cost.denominator for cost in exact))
    prefix = [0]
    for cost in exact:
        prefix.append(prefix[-1] + int(cost * unit))
    return prefix


def _stage_cost(prefix: Sequence[int], start: int, end: int) -> int:
    return prefix[end] - prefix[start]


def _least_maximum(prefix: Sequence[int], stages: int) -> int:
    """The cost of the dearest stage in the best partition: binary search over what greedy filling can meet."""
    low = max(_stage_cost(prefix, i, i + 1) for i in range(len(prefix) - 1))
    high = prefix[-1]
    while low < high:
        middle = (low + high) // 2
        if _stages_needed(prefix, middle) <= stages:
            high = middle
        else:
            low = middle + 1
    return low


def _stages_needed(prefix: Sequence[int], limit: int) -> int:
    """Fewest stages of at most ``limit``. Splitting one further never raises the maximum, so more also do."""
    needed, start = 0, 0
    while start < len(prefix) - 1:
        end = start + 1
        while end < len(prefix) - 1 and _stage_cost(prefix, start, end + 1) <= limit:
            end += 1
        needed, start = needed + 1, end
    return needed

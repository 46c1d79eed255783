"""The listings of docs/change-the-model.md train the same model under tp=2, pp=2 as in one process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from megazero.models import registry
from tests.distributed.runs import TokenSource, assert_close, run_rank, settings, train

PAGE = Path(__file__).parents[2] / "docs" / "change-the-model.md"
LISTINGS = dict(re.findall(r"```python title=(\S+)\n(.*?)```", PAGE.read_text(), re.DOTALL))
SIZES = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 37,
    "position": "rotary",
}


def forget() -> None:
    registry._activations.clear()
    registry._attentions.clear()


def run_with_listing(tree: dict[str, Any], source: TokenSource, weights: Any, steps: int) -> Any:
    """`run_rank` in a process that has run the user's file named in the tree."""
    forget()
    exec(LISTINGS[tree["listing"]], {"__name__": "listing"})
    try:
        return run_rank({name: section for name, section in tree.items() if name != "listing"}, source, weights, steps)
    finally:
        forget()


@pytest.mark.parametrize(
    "listing, field, value",
    [
        ("squared_relu.py", "activation", "squared_relu"),
        ("geglu.py", "activation", "geglu"),
        ("soft_capped.py", "attention", "soft_capped"),
        ("gated.py", "attention", "gated"),
    ],
)
def test_listing_under_tensor_and_pipeline_parallelism(listing: str, field: str, value: str) -> None:
    assert len(LISTINGS[listing].splitlines()) < 30
    source = TokenSource(SIZES["vocab_size"], 12)

    def outcome(layout: tuple[int, int, int]) -> Any:
        tree = settings(SIZES | {field: value}, layout)
        return train(tree | {"listing": listing}, source, function=run_with_listing)

    one, cut = outcome((1, 1, 1)), outcome((2, 2, 1))
    assert_close(cut, one)
    if listing == "gated.py":
        assert "layers.1.attention.output_gate.weight" in cut.weights

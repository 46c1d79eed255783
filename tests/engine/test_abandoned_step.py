"""A step that ended in an error leaves nothing behind for the one that is taken in its place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megazero.config import Config
from tests.distributed.runs import (
    Outcome,
    TokenSource,
    assemble,
    assert_close,
    make_engine,
    pieces_of,
    plain_loop,
    random_weights,
    settings,
)

SIZES = {"num_layers": 3, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 37}


class Broken(Exception):
    pass


def train(tree: dict, source: TokenSource, weights: dict, where: str) -> tuple[list, list]:
    """The second step is tried twice: in its second micro-batch, layer 1 fails."""
    with make_engine(tree, weights) as engine:
        metrics = [engine.train_batch(source)]
        calls = []

        def fail(*_: object) -> None:
            calls.append(None)
            if len(calls) == 2:
                raise Broken

        def on_output(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> None:
            fail() if where == "forward" else output.register_hook(fail)

        hook = engine.stage.model.layers["1"].mlp.register_forward_hook(on_output)
        with pytest.raises(Broken):
            engine.train_batch(source)
        hook.remove()
        metrics += [engine.train_batch(source) for _ in range(2)]
        return [(float(m.loss), float(m.grad_norm), m.lr) for m in metrics], pieces_of(engine)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(
    ("dp", "zero", "parallel"),
    [
        (1, {"stage": 0}, {}),
        (1, {"stage": 1}, {"schedule": "zero_bubble"}),
        (2, {"stage": 2, "offload_optimizer": {"device": "cpu"}}, {}),
        (2, {"stage": 3}, {}),
    ],
)
def test_what_is_tried_again_is_as_if_it_had_not_failed(
    ranks: Callable, dp: int, zero: dict, parallel: dict, where: str
) -> None:
    tree = settings(SIZES, parallel=parallel, zero=zero, train={"micro_batch_size": 1, "global_batch_size": 3 * dp})
    source = TokenSource(SIZES["vocab_size"], 12)
    weights = random_weights(Config.from_dict(tree).model.architecture)
    results = ranks(dp, train, tree, source, weights, where, timeout=60)
    found = Outcome(*map(list, zip(*results[0][0])), assemble([pieces for _, pieces in results]))
    assert_close(found, plain_loop(tree, source, weights))

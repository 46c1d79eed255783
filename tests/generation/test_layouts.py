"""P1 for generation: every layout gives the tokens of one process, with weights of its own or a training engine's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from megazero.generation import Generator, Sampling
from megazero.models.config import ModelConfig
from tests.distributed.runs import TokenSource, make_engine, random_weights, settings
from tests.generation import models

GREEDY, DRAWN = Sampling(temperature=0), Sampling(temperature=0.8, top_p=0.9, seed=2)
PROMPTS = models.prompts([3, 9, 1])
STOP = 7


def continue_prompts(directory: Path, tp: int, pp: int) -> list[list[list[int]]]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = models.open_generator(directory, tp, pp, rank)
    return [
        generator.generate(PROMPTS, 16, GREEDY),
        generator.generate(PROMPTS, 8, DRAWN, stop_tokens=[STOP], batch_size=2),
    ]


@pytest.mark.parametrize(("name", "layouts"), [("gpt2", [(2, 2)]), ("llama-one-kv-head", [(2, 1), (1, 2), (2, 2)])])
def test_a_layout_gives_the_tokens_of_one_process(
    name: str, layouts: list[tuple[int, int]], ranks: Callable, tmp_path: Path
) -> None:
    model = models.build(name)
    model.save_pretrained(tmp_path)
    one = continue_prompts(tmp_path, 1, 1)
    assert one[0] == models.expected(model, PROMPTS, 16)
    assert one[1] != [tokens[:8] for tokens in one[0]]
    for tp, pp in layouts:
        assert ranks(tp * pp, continue_prompts, tmp_path, tp, pp, timeout=240) == [one] * (tp * pp)


TINY = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "vocab_size": 37,
    "max_position_embeddings": 24,
    "dropout": 0.1,
}


def train_and_generate(tree: dict[str, Any], generate: bool) -> tuple[list[float], list[list[int]]]:
    """Losses of the steps before and after generation, and what was generated in between."""
    source, found = TokenSource(37, 12), []
    with make_engine(tree, random_weights(ModelConfig(**TINY))) as engine:
        losses = [float(engine.train_batch(source).loss)]
        if generate:
            generator = Generator(engine.stage.model, engine.topology, engine.stage.sharded)
            found = generator.generate([[1, 2, 3], [4]], 15, GREEDY)
        losses.append(float(engine.train_batch(source).loss))
    return losses, found


def with_and_without(tree: dict[str, Any]) -> list[tuple[list[float], list[list[int]]]]:
    return [train_and_generate(tree, generate) for generate in (True, False)]


def test_a_training_engine_generates_between_steps(ranks: Callable) -> None:
    """With sequence parallelism, recompute and parameters cut over ranks; the run then goes on as if nothing was."""
    _, wanted = train_and_generate(settings(TINY), True)
    cut = settings(
        TINY,
        (2, 1, 2),
        zero={"stage": 3, "stage3_param_persistence_threshold": 0},
        parallel={"sequence_parallel": True},
        train={"recompute": "selective"},
    )
    for (losses, found), (untouched, _) in ranks(4, with_and_without, cut, timeout=240):
        assert found == wanted
        assert losses == untouched


def test_compiled_layers_are_not_compiled_again(ranks: Callable) -> None:
    """One graph per length would be minutes of compiling: generation runs the layers eagerly."""
    tree = settings({**TINY, "dropout": 0.0}, (1, 1, 1), train={"compile": False, "recompute": "full"})
    with make_engine(tree, random_weights(ModelConfig(**TINY))) as engine:
        generator = Generator(engine.stage.model, engine.topology, engine.stage.sharded)
        wanted = generator.generate([[1, 2, 3], [4]], 15, GREEDY)
        graphs = []

        def count(graph: torch.fx.GraphModule, _inputs: Any) -> torch.fx.GraphModule:
            graphs.append(graph)
            return graph

        for layer in engine.stage.model.layers.values():
            layer.forward = torch.compile(layer.forward, fullgraph=True, dynamic=False, backend=count)
        assert generator.generate([[1, 2, 3], [4]], 15, GREEDY) == wanted
        assert graphs == []
        engine.train_batch(TokenSource(37, 12))
        assert graphs != []

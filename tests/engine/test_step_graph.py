"""What of a step by a CUDA graph is Python's. The graph is stood in for by the same work, done again on the CPU on the
tensors of the step that it was captured from; tests/gpu has real ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megazero.config import Config, load_config
from megazero.engine import Engine
from megazero.errors import ConfigError
from megazero.step_graph import WARM_UP, StepGraph
from tests.engine.tiny import flags, open_run, tiny


class Again:
    """Leaves the loss and the gradients where those of the first time were."""

    def __init__(self, engine: Engine, work: Callable[[], torch.Tensor]) -> None:
        self._sharded, self._work = engine.stage.sharded, work
        self.loss, self.replays, self.is_reset = work(), 0, False
        self._gradients = [block.gradient.owned() for block in self._sharded.trained]

    def replay(self) -> None:
        self.replays += 1
        self._sharded.forget_gradients()
        self.loss.copy_(self._work())
        for kept, block in zip(self._gradients, self._sharded.trained, strict=True):
            kept.copy_(block.gradient.owned())
        self._sharded.forget_gradients()
        self._sharded.take_gradients(self._gradients)

    def reset(self) -> None:
        self.is_reset = True


def test_steps_are_the_same(corpus: Path) -> None:
    """To the bit: with accumulation and dropout, an evaluation between, and a batch that grows, which takes a second
    graph."""
    changes = {"train.rampup_batch_size": [4, 4, 20], "train.micro_batch_size": 2, "train.steps": 12}
    changes |= {
        "model.dropout": 0.1,
        "model.attention_dropout": 0.0,
        "zero.stage": 1,
        "data.valid": corpus / "valid",
        "train.eval_steps": 1,
    }
    numbers, weights, graphs = [], [], []
    for by_graph in (False, True):
        engine, train, valid = open_run(tiny(corpus, changes))
        with engine:
            if by_graph:

                def record(work: Callable[[], torch.Tensor], engine: Engine = engine) -> tuple[Again, torch.Tensor]:
                    graphs.append(Again(engine, work))
                    return graphs[-1], graphs[-1].loss

                engine._graph = StepGraph(engine._run, engine.stage, record)
            found = []
            while engine.running():
                metrics = engine.train_batch(train)
                found.append((metrics.loss, metrics.grad_norm))
                if engine.step == 4:
                    found.append((torch.tensor(engine.evaluate(valid)), torch.tensor(0.0)))
            numbers.append([(float(loss), float(norm)) for loss, norm in found])
            weights.append([block.owned_state("weight").clone() for block in engine.stage.sharded.blocks])
    assert numbers[1] == numbers[0]
    assert all(map(torch.equal, *weights))
    small = 5  # steps of 4 samples
    assert [graph.replays for graph in graphs] == [small - WARM_UP, 12 - small - WARM_UP]
    assert [graph.is_reset for graph in graphs] == [True, False]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"zero.stage": 2}, "zero.stage 2 lets go of memory within a step"),
        ({"zero.stage": 1, "zero.offload_optimizer.device": "cpu"}, "zero.offload_optimizer.device not none"),
        ({"log.timeline": "times"}, "log.timeline set"),
        ({"model.attention_dropout": 0.1}, "model.attention_dropout above 0"),
        ({"train.recompute": "full", "train.offload_activations": True}, "train.offload_activations true"),
    ],
)
def test_what_needs_the_host_within_a_step_is_an_error(corpus: Path, changes: dict, told: str) -> None:
    with pytest.raises(ConfigError, match=f"train.cuda_graph: does not go with {told}"):
        load_config(flags(tiny(corpus, changes | {"train.cuda_graph": True})), world_size=1)


def test_several_processes_or_none_of_a_gpu_are_an_error(corpus: Path) -> None:
    config: Config = load_config(flags(tiny(corpus, {"train.cuda_graph": True})), world_size=1)
    with pytest.raises(ConfigError, match=r"train.cuda_graph: is for one process and there are 2"):
        config.validate_world(2)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"train.cuda_graph: there is no CUDA GPU"):
            Engine(config)

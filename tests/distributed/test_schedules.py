"""P1 for pipeline schedules: whatever their order and number of chunks, the run of a plain float64 loop of torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from megazero.build import describe_stage, rank_layers, stage_layers
from megazero.config import Config
from megazero.config_tree import merged
from megazero.models.config import ModelConfig
from megazero.models.gpt import GPT
from megazero.planner.memory import plan
from megazero.tensor_parallel.mappings import TensorParallel
from megazero.zero.blocks import decoder_units
from tests.distributed.runs import (
    LOSS,
    Layout,
    Outcome,
    Piece,
    TokenSource,
    Weights,
    assemble,
    assert_close,
    fused,
    make_engine,
    pieces_of,
    plain_loop,
    plain_loss,
    random_weights,
    set_weights,
    settings,
    train,
)
from tests.distributed.test_layout_invariance import GPT2, LLAMA
from tests.planner.live import LiveStorages

GPT2 = {**GPT2, "num_layers": 5}
LLAMA = {**LLAMA, "num_layers": 5}


def check(model: dict[str, Any], layout: Layout, virtual_pp: int, **sections: Any) -> None:
    """A few steps of an interleaved schedule against the plain loop."""
    tree = settings(model, layout, **merged({"parallel": {"virtual_pp": virtual_pp}}, sections))
    source, weights = TokenSource(model["vocab_size"], 12), random_weights(ModelConfig(**model))
    truth = plain_loop(settings(model, train=sections.get("train", {})), source, weights)
    assert_close(train(tree, source, weights, dp=layout[2]), truth)


@pytest.mark.parametrize(
    ("model", "layout", "virtual_pp", "sections"),
    [
        pytest.param(GPT2, (1, 2, 1), 2, {}, id="tied"),
        pytest.param(LLAMA, (2, 2, 1), 2, {"parallel": {"schedule": "interleaved"}}, id="tensor parallel"),
        pytest.param(GPT2, (1, 2, 1), 2, {"parallel": {"partition": (1, 2, 1, 1)}}, id="uneven by hand"),
        pytest.param({**LLAMA, "num_layers": 7}, (1, 3, 1), 2, {}, id="three ranks, a group of one at the end"),
        pytest.param(GPT2, (1, 2, 1), 2, {"train": {"micro_batch_size": 4}}, id="fewer micro-batches than ranks"),
        pytest.param(LLAMA, (1, 2, 2), 2, {"zero": {"stage": 0}}, id="data parallel"),
        pytest.param(GPT2, (1, 2, 2), 2, {"zero": {"stage": 1, "reduce_bucket_size": 10**9}}, id="stage 1"),
        pytest.param(GPT2, (1, 2, 2), 2, {"zero": {"stage": 2}, "train": {"recompute": "full"}}, id="stage 2, full"),
        pytest.param(
            LLAMA, (1, 2, 2), 2, {"zero": {"stage": 3}, "train": {"recompute": "selective"}}, id="stage 3, selective"
        ),
        pytest.param(
            GPT2, (1, 2, 2), 2, {"zero": {"stage": 3}, "parallel": {"keep_gathered": True}}, id="stage 3, gathered once"
        ),
        pytest.param({**GPT2, "dropout": 0.3, "attention_dropout": 0.0}, (1, 2, 1), 2, {}, id="dropout"),
    ],
)
def test_interleaved(model: dict[str, Any], layout: Layout, virtual_pp: int, sections: dict[str, Any]) -> None:
    check(model, layout, virtual_pp, **sections)


def test_each_layer_is_built_once() -> None:
    tree = settings({**GPT2, "num_layers": 30}, (1, 4, 1), parallel={"virtual_pp": 3})
    config = Config.from_dict(tree, world_size=4)
    model = config.model.architecture
    stages = stage_layers(config, model)
    assert [layer for stage in stages for layer in stage] == list(range(30)) and len(stages) == 12
    for rank in range(4):
        decoder, specs = describe_stage(config, model, {"pp": rank, "dp": 0, "tp": 0}, TensorParallel())
        held = [*stages[rank], *stages[rank + 4], *stages[rank + 8]]
        assert [int(layer) for layer in decoder.layers] == held
        chunks = {u.name: u.chunk for u in decoder_units(decoder, specs, rank_layers(config, model, rank))}
        assert all(i in stages[rank + 4 * chunks[f"layers.{i}"]] for i in held)
        assert chunks.get("embedding.position", 0) == 0 and chunks.get("final", 2) == 2


SEQUENCE_PARALLEL = {"parallel": {"sequence_parallel": True}}


@pytest.mark.parametrize(
    ("model", "layout", "sections"),
    [
        pytest.param(GPT2, (1, 2, 1), {}, id="tied"),
        pytest.param(LLAMA, (2, 2, 1), SEQUENCE_PARALLEL, id="tensor and sequence parallel"),
        pytest.param(
            GPT2,
            (2, 2, 1),
            {"parallel": {"sequence_parallel": False}},
            id="tensor parallel, biases",
            marks=pytest.mark.whole,
        ),
        pytest.param(GPT2, (1, 3, 1), {"parallel": {"partition": (1, 3, 1)}}, id="uneven by hand"),
        pytest.param(GPT2, (1, 3, 1), {"train": {"micro_batch_size": 2}}, id="fewer micro-batches than ranks"),
        pytest.param(LLAMA, (1, 2, 2), {"zero": {"stage": 0}}, id="data parallel"),
        pytest.param(GPT2, (1, 2, 2), {"zero": {"stage": 1, "reduce_bucket_size": 3000}}, id="stage 1"),
        pytest.param({**GPT2, "dropout": 0.3, "attention_dropout": 0.0}, (1, 2, 1), {}, id="dropout"),
    ],
)
def test_zero_bubble(model: dict[str, Any], layout: Layout, sections: dict[str, Any]) -> None:
    """Against the plain loop; and to the bit as where the same kernels run in one backward."""
    tree = settings(model, layout, **merged({"parallel": {"schedule": "zero_bubble"}}, sections))
    source, weights = TokenSource(model["vocab_size"], 12), random_weights(ModelConfig(**model))
    split = train(tree, source, weights, dp=layout[2])
    assert_close(split, plain_loop(settings(model, train=sections.get("train", {})), source, weights))
    whole = train(merged(tree, {"parallel": {"schedule": "1f1b"}}), source, weights, dp=layout[2])
    assert (split.losses, split.norms) == (whole.losses, whole.norms)
    for kind, tensors in whole.state.items():
        assert all(torch.equal(split.state[kind][name], tensor) for name, tensor in tensors.items())


def traffic(tree: dict[str, Any], source: TokenSource) -> dict[str, int]:
    """Elements of this rank's collectives over dp in the second step, the first one's agreements behind it."""
    with make_engine(tree) as engine:
        counted = engine.stage.sharded.groups.whole.elements
        engine.train_batch(source)
        before = counted.copy()
        engine.train_batch(source)
        return dict(counted - before)


@pytest.mark.parametrize("zero", [{"stage": 1}, {"stage": 2}, {"stage": 3}, {"stage": 3, "gathered": True}], ids=str)
def test_chunks_add_no_traffic_to_zero(ranks: Callable, zero: dict[str, Any]) -> None:
    """Each block is reduced and gathered as often as where a rank's layers are one chunk."""
    found = []
    for virtual_pp, partition in ((1, (3, 2)), (2, (2, 1, 1, 1))):
        parallel = {"virtual_pp": virtual_pp, "partition": partition, "keep_gathered": zero.get("gathered", False)}
        tree = settings(GPT2, (1, 2, 2), parallel=parallel, zero={"stage": zero["stage"]})
        counts = ranks(4, traffic, tree, TokenSource(37, 12))
        found.append({kind: sum(count[kind] for count in counts) for kind in counts[0]})
    assert found[0] == found[1] and found[0]


def peaks(tree: dict[str, Any]) -> tuple[int, int]:
    """Bytes of this rank in its second step: the most there were, and the most that was planned."""
    config = Config.from_dict(tree)
    with LiveStorages() as live, make_engine(config) as engine:
        source = TokenSource(config.model.vocab_size, config.data.seq_length)
        engine.train_batch(source)
        live.peak = 0
        engine.train_batch(source)
    return live.peak, plan(config, dist.get_world_size(), gpu=False).stages[dist.get_rank()].peak


@pytest.mark.parametrize(
    "parallel",
    [
        {"pp": 2, "virtual_pp": 2},
        pytest.param({"pp": 3, "schedule": "zero_bubble"}, marks=pytest.mark.whole),
    ],
    ids=str,
)
def test_memory_is_the_plans(ranks: Callable, parallel: dict[str, Any]) -> None:
    model = {**LLAMA, "num_layers": 8, "hidden_size": 64, "ffn_hidden_size": 176, "vocab_size": 300}
    train_section = {"global_batch_size": 16, "micro_batch_size": 4}
    more = {"data": {"seq_length": 64}, "train": train_section}
    tree = settings({**model, "max_position_embeddings": 64}, (1, parallel["pp"], 1), parallel=parallel, **more)
    for measured, planned in ranks(parallel["pp"], peaks, tree):
        assert planned == pytest.approx(measured, rel=0.05)


def go_on(tree: dict[str, Any], source: TokenSource, weights: Weights, steps: int) -> tuple[list, float, list[Piece]]:
    """``steps`` more steps from the checkpoint, if there is one; then evaluate and save."""
    with make_engine(tree) as engine:
        if not engine.step:
            set_weights(engine, weights)
        metrics = [engine.train_batch(source) for _ in range(steps)]
        loss = engine.evaluate(source)
        engine.save(source)
        return [(float(m.loss), float(m.grad_norm), m.lr) for m in metrics], loss, pieces_of(engine)


PLAIN, INTERLEAVED, SPLIT = {"virtual_pp": 1}, {"virtual_pp": 2}, {"schedule": "zero_bubble"}


@pytest.mark.parametrize("schedules", [(INTERLEAVED, SPLIT), (SPLIT, PLAIN), (PLAIN, INTERLEAVED)], ids=str)
def test_checkpoints_go_on_in_any_schedule(ranks: Callable, tmp_path: Path, schedules: tuple[dict, dict]) -> None:
    source, weights = TokenSource(37, 12), random_weights(ModelConfig(**GPT2))
    train_section = {"steps": 4, "eval_interval": 4, "eval_steps": 2}
    outcome = Outcome()
    for parallel in schedules:
        more = {"checkpoint": {"dir": str(tmp_path), "save_interval": 2}, "data": {"valid": "here"}}
        tree = settings(GPT2, (1, 2, 1), parallel=parallel, train=train_section, **more)
        found = ranks(2, go_on, tree, source, weights, 2)
        for loss, norm, rate in found[0][0]:
            outcome.losses.append(loss)
            outcome.norms.append(norm)
            outcome.rates.append(rate)
    outcome.state = assemble([pieces for _, _, pieces in found])
    assert_close(outcome, plain_loop(settings(GPT2, train={"steps": 4}), source, weights))
    model = GPT(ModelConfig(**GPT2)).double()
    model.load_state_dict({**fused(outcome.weights), "head.weight": outcome.weights["embedding.word.weight"]})
    with torch.no_grad():
        truth = sum(float(plain_loss(model, source.batch(torch.arange(4) + 4 * i))) for i in range(2)) / 2
    assert all(loss == pytest.approx(truth, rel=LOSS) for _, loss, _ in found)


@pytest.mark.parametrize("parallel", [INTERLEAVED, SPLIT], ids=str)
def test_a_run_resumes_to_the_bit(ranks: Callable, tmp_path: Path, parallel: dict[str, Any]) -> None:
    source, weights = TokenSource(37, 12), random_weights(ModelConfig(**GPT2))
    states = []
    for name, parts in (("whole", (3,)), ("stopped", (1, 2))):
        for steps in parts:
            checkpoint = {"dir": str(tmp_path / name), "save_interval": 1}
            tree = settings(GPT2, (1, 2, 1), parallel=parallel, checkpoint=checkpoint)
            found = ranks(2, go_on, tree, source, weights, steps)
        states.append(assemble([pieces for _, _, pieces in found]))
    for kind, tensors in states[0].items():
        assert all(torch.equal(tensors[name], states[1][kind][name]) for name in tensors)

"""Conditions that other frameworks were broken by: loss, gradients, layouts. Test names carry the cases' numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megazero.build import describe_stage, stage_layers
from megazero.config import Config
from megazero.errors import ConfigError
from megazero.models.config import ModelConfig
from megazero.models.gpt import GPT
from megazero.models.parameters import flops_per_token, parameter_count, parameter_shapes
from megazero.tensor_parallel.mappings import TensorParallel
from tests.distributed import runs
from tests.distributed.runs import (
    Layout,
    Outcome,
    TokenSource,
    Weights,
    assert_close,
    fused,
    make_engine,
    make_whole,
    plain_loop,
    plain_loss,
    random_weights,
    settings,
    split_up,
    state_pieces,
    tensor_error,
    train,
)

GPT2 = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "vocab_size": 37,
    "max_position_embeddings": 24,
}
QWEN3 = {
    **GPT2,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "ffn_hidden_size": 24,
    "norm": "rmsnorm",
    "activation": "swiglu",
    "position": "rotary",
    "qkv_bias": False,
    "out_bias": False,
    "mlp_bias": False,
    "qk_norm": True,
    "tie_word_embeddings": False,
}
WORD = "embedding.word"


# 14


@pytest.mark.parametrize(("layers", "pp"), [(30, 4), (80, 16), (7, 2)])
def test_14_each_layer_is_built_once(layers: int, pp: int) -> None:
    tree = settings({**GPT2, "num_layers": layers}, (1, pp, 1))
    config = Config.from_dict(tree, world_size=pp)
    model = config.model.architecture
    assert [i for stage in stage_layers(config, model) for i in stage] == list(range(layers))
    counts: dict[str, int] = {}
    for stage in range(pp):
        decoder, specs = describe_stage(config, model, {"pp": stage, "dp": 0, "tp": 0}, TensorParallel())
        assert [int(i) for i in decoder.layers] == list(stage_layers(config, model)[stage])
        for spec in specs.values():
            for piece in spec.pieces:
                counts[piece.name] = counts.get(piece.name, 0) + 1
    # The tied word embedding is on the first and the last stage.
    assert counts == {name: 1 + (name == f"{WORD}.weight") for name in parameter_shapes(model)}
    h, v, p, s = model.hidden_size, model.vocab_size, model.max_position_embeddings, 12
    assert parameter_count(model) == layers * (12 * h * h + 13 * h) + (v + p + 2) * h
    assert flops_per_token(model, s) == 6 * (layers * 12 * h * h + v * h) + 6 * layers * h * s


def test_14_more_stages_than_layers_are_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.pp.*at most 2"):
        Config.from_dict(settings(GPT2, (1, 4, 1)), world_size=4)


# 15


@pytest.mark.parametrize(("tp", "multiple"), [(1, 1), (1, 128), (2, 1), (2, 128), (4, 1), (4, 128)])
def test_15_vocabulary_of_50257(tp: int, multiple: int) -> None:
    model = {**GPT2, "num_layers": 1, "hidden_size": 8, "vocab_size": 50257}
    tree = settings(model, (tp, 1, 1), parallel={"vocab_multiple": multiple}, train={"steps": 2, "micro_batch_size": 4})
    source, weights = TokenSource(50257, 12), random_weights(ModelConfig(**model))
    # Both ends of the vocabulary take part, so that every rank has a target.
    source.fields["tokens"][:, 1:4] = torch.tensor([0, 25129, 50256])
    assert_close(train(tree, source, weights), plain_loop(tree, source, weights))


@pytest.mark.parametrize("tp", [1, 2])
def test_15_padding_is_out_of_the_loss_after_many_steps_at_a_high_rate(tp: int, pytestconfig: pytest.Config) -> None:
    """The weights the run ends with cost the same in a model that knows no padding. 2000 steps with --whole."""
    model = {**GPT2, "num_layers": 1, "hidden_size": 8, "vocab_size": 101}
    tree = settings(
        model,
        (tp, 1, 1),
        parallel={"vocab_multiple": 128},
        data={"seq_length": 4},
        optimizer={"lr": 0.05, "min_lr": 0.05, "weight_decay": 0.0},
        train={"steps": 2000 if pytestconfig.getoption("whole") else 60, "global_batch_size": 1},
    )
    source = TokenSource(101, 4)
    end = train(tree, source, timeout=1200)
    plain = plain_loss(plain_model(ModelConfig(**model), end.weights), source.batch(torch.arange(1)))
    assert train(tree, source, end.weights, steps=1).losses[0] == pytest.approx(plain.item(), rel=runs.LOSS)


def plain_model(config: ModelConfig, weights: Weights) -> GPT:
    model = GPT(config).double()
    values = fused(weights)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])
    return model


# 16


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_16_a_head_that_knows_nothing_costs_the_log_of_the_vocabulary(tp: int) -> None:
    weights = random_weights(ModelConfig(**QWEN3))
    weights["head.weight"].zero_()
    outcome = train(settings(QWEN3, (tp, 1, 1)), TokenSource(37, 12), weights, steps=1)
    assert outcome.losses[0] == pytest.approx(math.log(37), rel=1e-6)


# 17


def word_embedding_after(tree: dict[str, Any], source: TokenSource, steps: int) -> torch.Tensor | None:
    """This rank's whole local copy, as its forward uses it."""
    with make_engine(tree) as engine:
        for _ in range(steps):
            engine.train_batch(source)
        make_whole(engine.stage.sharded)
        return next((b.flat.clone() for b in engine.stage.sharded.blocks if b.layout.name == WORD), None)


def test_17_tied_copies_are_the_same_bits_after_100_steps(ranks: Callable) -> None:
    tree = settings(
        {**GPT2, "hidden_size": 8},
        (1, 2, 2),
        zero={"stage": 1},
        data={"seq_length": 4},
        train={"steps": 100, "global_batch_size": 2},
        optimizer={"lr": 0.01},
    )
    source = TokenSource(37, 4)
    copies = ranks(4, word_embedding_after, tree, source, 100)
    before = ranks(4, word_embedding_after, tree, source, 0)
    assert all(torch.equal(copy, copies[0]) for copy in copies)
    assert all(torch.equal(copy, before[0]) for copy in before)
    assert not torch.equal(copies[0], before[0])


def norm_of_ones_on_the_word_embedding(tree: dict[str, Any]) -> float:
    with make_engine(tree) as engine:
        sharded = engine.stage.sharded
        make_whole(sharded)
        for block in sharded.blocks:
            block.gradient.buffer = torch.zeros(block.layout.numel)
            for first, last, piece, _ in block.layout.pieces(0, block.layout.numel):
                if piece.name == f"{WORD}.weight":
                    # The two copies' shares of a gradient of 1.
                    block.gradient.buffer[first:last] = 1 / tree["parallel"]["pp"]
            if tree["zero"]["stage"] > 1:
                block.gradient.keep_owned()
        tokens = 48.0 if engine.topology.rank == 0 else 0.0
        sums = engine.optimizer.run(1, 0.0, torch.zeros((), dtype=torch.float64), tokens, 48, False)
        return float(sums.grad_norm)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("layout", [(1, 1, 1), (1, 2, 1), (1, 2, 2), (2, 2, 1)], ids=str)
def test_17_a_tied_weight_counts_once_in_the_norm(ranks: Callable, layout: Layout, zero: int) -> None:
    model = {**GPT2, "hidden_size": 8, "vocab_size": 100}
    tree = settings(model, layout, zero={"stage": zero})
    norms = ranks(math.prod(layout), norm_of_ones_on_the_word_embedding, tree)
    assert norms == pytest.approx([math.sqrt(800)] * math.prod(layout), rel=1e-6)


# 18


def reduced_gradients(
    tree: dict[str, Any], source: TokenSource, weights: Weights, steps: int
) -> tuple[list[tuple[float, float, float]], list[runs.Piece]]:
    """The first step's gradients, of the mean loss, as AdamW is about to get them."""
    with make_engine(tree, weights) as engine:
        pieces: list[runs.Piece] = []
        optimizer, step = engine.optimizer.adam, engine.optimizer.adam.step

        def recording(lr: float, factor: torch.Tensor, skip: torch.Tensor) -> None:
            pieces.extend(state_pieces(engine, "gradient", lambda block: block.gradient.owned() * factor.float()))
            step(lr, factor, skip)

        optimizer.step = recording
        metrics = engine.train_batch(source)
        return [(float(metrics.loss), float(metrics.grad_norm), metrics.lr)], pieces


def assert_gradients(tree: dict[str, Any], dp: int, source: TokenSource) -> Outcome:
    """Whole, equal on all that hold them, and those of the plain model; clipping is off."""
    config = Config.from_dict(tree).model.architecture
    weights = random_weights(config)
    ours = train(tree, source, weights, dp=dp, steps=1, function=reduced_gradients)
    plain = plain_model(config, weights)
    plain_loss(plain, source.batch(torch.arange(tree["train"]["global_batch_size"]))).backward()
    truth = split_up({name: p.grad for name, p in plain.named_parameters()}, config)
    total = sum(float(gradient.square().sum()) for gradient in truth.values()) ** 0.5
    assert ours.norms[0] == pytest.approx(total, rel=1e-6)
    for name, gradient in truth.items():
        if float(gradient.norm()) < 1e-12 * total:  # the key bias: softmax does not see it
            assert float(ours.state["gradient"][name].norm()) < 1e-6 * total, name
        else:
            assert tensor_error(ours.state["gradient"][name], gradient) < 1e-5, name
    return ours


@pytest.mark.parametrize("model", [GPT2, QWEN3], ids=["gpt2", "qwen3"])
@pytest.mark.parametrize(("tp", "sequence"), [(2, True), (2, False), (4, True)])
def test_18_gradients_of_norms_are_whole_on_every_tp_rank(model: dict[str, Any], tp: int, sequence: bool) -> None:
    tree = settings(model, (tp, 1, 1), parallel={"sequence_parallel": sequence}, optimizer={"clip_grad_norm": 0.0})
    assert_gradients(tree, 1, TokenSource(37, 12))


# 19


def run_with_late_gathers(tree: dict[str, Any], source: TokenSource, weights: Weights, steps: int):
    """As runs.run_rank, but what an all-gather brings is NaN until the moment it is waited for."""
    with make_engine(tree, weights) as engine:
        dp = engine.stage.sharded.groups.shard
        gather = dp.all_gather

        def late(buffers, slices):
            for buffer, own in zip(buffers, slices, strict=True):
                kept = own.clone()  # a part of the buffer, where that stays
                buffer.fill_(math.nan)
                own.copy_(kept)
            return _Late(lambda: gather(buffers, slices).wait())

        dp.all_gather = late
        metrics = [engine.train_batch(source) for _ in range(steps)]
        return [(float(m.loss), float(m.grad_norm), m.lr) for m in metrics], runs.pieces_of(engine)


class _Late:
    def __init__(self, wait: Callable[[], object]) -> None:
        self.wait = wait


@pytest.mark.parametrize(
    ("layout", "bucket", "stages"),
    [
        ((1, 1, 2), 1, (0, 1)),
        ((1, 1, 2), 3000, (0, 1)),
        ((1, 2, 2), 1, (0, 1)),
        ((1, 2, 2), 10**9, (0, 1)),
        ((1, 2, 2), 1000, (3, 3)),
    ],
)
def test_19_no_parameter_is_used_before_its_gather_is_done(
    layout: Layout, bucket: int, stages: tuple[int, int]
) -> None:
    source, weights = TokenSource(37, 12), random_weights(ModelConfig(**GPT2))
    trees = [settings(GPT2, layout, zero={"stage": stage, "allgather_bucket_size": bucket}) for stage in stages]
    whole = train(trees[0], source, weights, dp=2)
    late = train(trees[1], source, weights, dp=2, function=run_with_late_gathers)
    assert (late.losses, late.norms) == (whole.losses, whole.norms)
    for kind in runs.KINDS:
        assert all(torch.equal(late.state[kind][name], value) for name, value in whole.state[kind].items())


# 20


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("accumulation", [1, 2, 7])
def test_20_one_data_parallel_rank_and_accumulation(accumulation: int, zero: int) -> None:
    batch = {"global_batch_size": 14, "micro_batch_size": 14 // accumulation}
    tree = settings(GPT2, zero={"stage": zero}, train=batch, optimizer={"clip_grad_norm": 0.0})
    source, weights = TokenSource(37, 12), random_weights(ModelConfig(**GPT2))
    assert_close(train(tree, source, weights), plain_loop(tree, source, weights))
    assert_gradients(tree, 1, source)


# 21


def unevenly_masked() -> TokenSource:
    """Of 4 samples a step, odd ones go to the second of two ranks: see the comments."""
    source = TokenSource(37, 12)
    weights = source.fields["weights"]
    generator = torch.Generator().manual_seed(3)
    weights[:] = (torch.rand(weights.shape, generator=generator) < torch.rand(32, 1, generator=generator)).float()
    weights[0, 3:] = 0
    weights[[1, 3]] = 0  # step 1: nothing on the second rank
    weights[[4, 5]] = 0  # step 2: nothing in the first micro-batch of either
    weights[8:12] = 0
    weights[11, 11] = 1  # step 3: one token in all
    return source


@pytest.mark.parametrize("layout", [(1, 1, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2)], ids=str)
def test_21_uneven_masks_give_the_mean_over_all_tokens(layout: Layout) -> None:
    source, weights = unevenly_masked(), random_weights(ModelConfig(**GPT2))
    tree = settings(GPT2, layout, zero={"stage": 1}, optimizer={"clip_grad_norm": 0.0})
    assert_close(train(tree, source, weights, dp=layout[2]), plain_loop(tree, source, weights))
    assert_gradients(tree, layout[2], source)


# 22


@pytest.mark.parametrize("model", [GPT2, QWEN3], ids=["tied", "untied"])
def test_22_the_norm_before_clipping_is_that_of_all_stages(model: dict[str, Any]) -> None:
    source, weights = TokenSource(37, 12), random_weights(ModelConfig(**model))
    one, two = (
        train(settings(model, (1, pp, 1), optimizer={"clip_grad_norm": 1e-3}), source, weights, steps=2)
        for pp in (1, 2)
    )
    assert two.norms == pytest.approx(one.norms, rel=1e-6)
    assert min(one.norms) > 0.1


# 23


def run_and_evaluate(tree: dict[str, Any], source: TokenSource, weights: Weights) -> tuple[list[float], float]:
    with make_engine(tree, weights) as engine:
        losses = [float(engine.train_batch(source).loss) for _ in range(2)]
        return losses, engine.evaluate(source)


@pytest.mark.parametrize(
    ("layout", "schedule"),
    [((1, 1, 1), "1f1b"), ((1, 3, 1), "gpipe"), ((1, 3, 1), "1f1b"), ((2, 2, 1), "1f1b"), ((1, 2, 2), "gpipe")],
)
def test_23_the_loss_is_there_on_every_rank_and_in_the_log(
    ranks: Callable, tmp_path: Path, layout: Layout, schedule: str
) -> None:
    model = {**GPT2, "num_layers": 3}
    path = tmp_path / "metrics.jsonl"
    tree = settings(
        model,
        layout,
        parallel={"schedule": schedule},
        log={"interval": 1, "jsonl": str(path)},
        train={"steps": 2, "eval_steps": 2},
    )
    source, weights = TokenSource(37, 12), random_weights(ModelConfig(**model))
    results = ranks(math.prod(layout), run_and_evaluate, tree, source, weights)
    truth = plain_loop(tree, source, weights)
    after = plain_model(ModelConfig(**model), truth.weights)
    valid_loss = sum(plain_loss(after, source.batch(torch.arange(i, i + 4))).item() for i in (0, 4)) / 2
    assert all(result == results[0] for result in results)
    assert results[0][0] == pytest.approx(truth.losses, rel=runs.LOSS)
    assert results[0][1] == pytest.approx(valid_loss, rel=runs.LOSS)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["loss"] for line in lines if "loss" in line] == results[0][0]
    assert [line["valid_loss"] for line in lines if "valid_loss" in line] == [results[0][1]]


# 24


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_24_fewer_micro_batches_than_stages(schedule: str, micro_batches: int) -> None:
    model = {**GPT2, "num_layers": 4}
    batch = {"global_batch_size": 6, "micro_batch_size": 6 // micro_batches}
    tree = settings(model, (1, 4, 1), parallel={"schedule": schedule}, train=batch)
    source, weights = TokenSource(37, 12), random_weights(ModelConfig(**model))
    assert_close(train(tree, source, weights), plain_loop(tree, source, weights))


# 25


def test_25_512_micro_batches_in_bf16_are_summed_in_float32() -> None:
    """The same sample 512 times: bf16 would stop adding at 256 of them, float32 sums them exactly."""
    model = {**GPT2, "num_layers": 1, "hidden_size": 8}
    source = TokenSource(37, 4, samples=1)
    weights = random_weights(ModelConfig(**model))

    def norm(global_batch_size: int, micro_batch_size: int, **train_fields: str) -> float:
        batch = {"global_batch_size": global_batch_size, "micro_batch_size": micro_batch_size}
        tree = settings(model, data={"seq_length": 4}, train={**batch, "precision": "bf16", "steps": 2, **train_fields})
        return train(tree, source, weights, steps=1).norms[0]

    alone = norm(1, 1)
    assert norm(512, 1) == pytest.approx(alone, rel=1e-6)
    assert norm(512, 512, precision="fp32") == pytest.approx(alone, rel=0.02)
    # That the test can tell: asked to, it does sum in bf16.
    assert norm(512, 1, grad_dtype="bf16") < 0.8 * alone

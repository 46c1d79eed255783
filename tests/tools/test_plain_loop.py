"""plain_loop.py does the engine's work without the engine: its losses, over several updates, are the engine's."""

from __future__ import annotations

import pytest
import torch

from megazero.config import load_config
from megazero.engine import Engine
from megazero.errors import LaunchError
from megazero.restore import resolve_model
from tools import benchmark, plain_loop

SIZES = (
    "--model.num_layers 2 --model.hidden_size 32 --model.num_attention_heads 4 --model.vocab_size 61 "
    "--data.seq_length 12 --train.global_batch_size 6 --train.micro_batch_size 2 --train.steps 5 "
    "--optimizer.lr 1e-2 --optimizer.warmup_steps 2 --optimizer.clip_grad_norm 0.5 --train.precision fp32 "
    "--train.compile false --log.interval 0"
)
LLAMA = (
    "--model.position rotary --model.norm rmsnorm --model.activation swiglu --model.num_key_value_heads 2 "
    "--model.qkv_bias false --model.out_bias false --model.mlp_bias false --model.tie_word_embeddings false"
)


@pytest.mark.parametrize("more", ["--model.dropout 0.2 --model.attention_dropout 0", LLAMA], ids=["gpt", "llama"])
def test_losses_are_the_engines(more: str) -> None:
    config = resolve_model(load_config(f"{SIZES} {more}".split(), world_size=1, needs_data=False), 1)
    _, losses = plain_loop.measure(config, torch.device("cpu"), warmup=1, steps=4)
    with Engine(config) as engine:
        source = benchmark.RandomTokens(61, 12)
        wanted = [float(engine.train_batch(source).loss) for _ in range(5)]
    assert losses == pytest.approx(wanted, rel=2e-6)
    assert len(set(losses)) == 5


def test_the_plain_loop_is_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def several() -> object:
        return type("Environment", (), {"world_size": 2, "local_rank": 0, "rank": 0})()

    monkeypatch.setattr(benchmark, "process_environment", several)
    with pytest.raises(LaunchError, match="--beside-plain-loop: the plain loop is of one process"):
        benchmark.main(["--beside-plain-loop", *SIZES.split()])


def test_its_speed_is_asked_of_a_process() -> None:
    assert benchmark.plain_loop_speed(["--warmup", "1", "--measure", "1", *SIZES.split()]) > 0

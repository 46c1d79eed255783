"""plain_loop.py does the engine's work without the engine: its losses, over several updates, are the engine's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megazero.config import Config
from megazero.engine import Engine
from megazero.errors import ConfigError, LaunchError
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


@pytest.mark.parametrize("more", ["--model.dropout 0.2 --model.attention_dropout 0.1", LLAMA], ids=["gpt", "llama"])
def test_losses_are_the_engines(more: str) -> None:
    assert_same(benchmark.load_settings(f"{SIZES} {more}".split(), 5, 1))


def test_weights_may_be_another_run_s(tmp_path: Path) -> None:
    place = ["--checkpoint.dir", str(tmp_path)]
    with Engine(benchmark.load_settings([*SIZES.split(), *LLAMA.split(), *place], 2, 1)) as engine:
        source = benchmark.RandomTokens(61, 12)
        engine.train_batch(source)
        engine.save(source)
    given = ["--data.seq_length", *SIZES.partition("--data.seq_length")[2].split()]
    config = benchmark.load_settings([*given, "--model.init_from", str(tmp_path)], 5, 1)
    assert config.model.num_key_value_heads == 2
    assert_same(config)


def assert_same(config: Config) -> None:
    _, losses = plain_loop.measure(config, torch.device("cpu"), warmup=1, steps=4)
    with Engine(config) as engine:
        source = benchmark.RandomTokens(61, 12)
        wanted = [float(engine.train_batch(source).loss) for _ in range(5)]
    assert losses == pytest.approx(wanted, rel=2e-6)
    assert len(set(losses)) == 5


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--train.rampup_batch_size 2 2 9", "train.rampup_batch_size: a step's time is that of one batch size"),
        ("--data.reset_at_document true", "data.reset_at_document: random tokens are of no document"),
        ("--measure 0", "--measure: 0 must be at least 1"),
        ("--warmup -1", "--warmup: -1 must be at least 0"),
        ("--train.precision fp16", "train.precision: fp16: the loop scales no loss"),
        ("--train.precision bf16 --train.grad_dtype bf16", "train.grad_dtype: bf16: the loop adds gradients up in"),
        ("--train.deterministic true", "train.deterministic: True: the loop's kernels are not"),
    ],
)
def test_what_would_not_be_measured_is_refused(flags: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plain_loop.main([*SIZES.split(), *flags.split()])


def test_the_plain_loop_is_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def several() -> object:
        return type("Environment", (), {"world_size": 2, "local_rank": 0, "rank": 0})()

    monkeypatch.setattr(benchmark, "process_environment", several)
    with pytest.raises(LaunchError, match="--beside-plain-loop: the plain loop is of one process"):
        benchmark.main(["--beside-plain-loop", *SIZES.split()])


def test_its_speed_is_asked_of_a_process() -> None:
    assert benchmark.plain_loop_speed(["--warmup", "1", "--measure", "1", *SIZES.split()]) > 0

"""Settings from files and flags."""

import json
import sys

import pytest

from megazero.config import Config, load_config
from megazero.config_cli import fields


def load(flags="", **kwargs):
    return load_config(flags.split(), needs_data=False, **kwargs)


def test_flags_win_over_the_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("train: {steps: 30, seed: 5}\nmodel:\n  preset: llama3.2-1b\n  num_layers: 2\n")
    config = load(f"--train.steps 40 --config {path} --model.dropout 0.1")
    assert (config.train.steps, config.train.seed) == (40, 5)
    assert (config.model.num_layers, config.model.hidden_size, config.model.dropout) == (2, 2048, 0.1)
    assert config.model.preset == "llama3.2-1b"


def test_the_last_of_a_flag_given_twice_counts():
    assert load("--train.steps 40 --train.steps=50").train.steps == 50


def test_lists_booleans_and_numbers():
    config = load(
        "--optimizer.betas 0.8 0.99 --parallel.pp 3 --parallel.partition 2 4 6 --train.deterministic true "
        "--data.shuffle false --parallel.sequence_parallel false --zero.reduce_bucket_size 5e6 --train.steps 20.0 "
        "--optimizer.lr 1e-4 --train.compile auto --train.recompute none --model.head_dim none"
    )
    assert config.optimizer.betas == (0.8, 0.99)
    assert config.parallel.partition == (2, 4, 6)
    assert config.train.deterministic is True and config.data.shuffle is False
    assert config.parallel.sequence_parallel is False
    assert config.zero.reduce_bucket_size == 5_000_000
    assert config.train.steps == 20
    assert config.optimizer.lr == 1e-4
    assert config.train.compile == "auto" and config.train.recompute == "none"
    assert config.model.head_dim is None


@pytest.mark.parametrize(
    "given, blend",
    [
        (["corpus"], ((1.0, "corpus"),)),
        (["0.3", "a", "0.7", "b"], ((0.3, "a"), (0.7, "b"))),
        (["0.001", "a", "0.999", "a", "0", "b"], ((0.001, "a"), (0.999, "a"), (0.0, "b"))),
        (["2024"], ((1.0, "2024"),)),
    ],
)
def test_blends(given, blend, tmp_path):
    assert load_config(["--data.train", *given]).data.train == blend
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"data": {"train": given if len(given) > 1 else given[0], "valid": blend}}))
    config = load_config(["--config", str(path)])
    assert config.data.train == config.data.valid == blend


def test_yaml_means_what_it_looks_like(tmp_path):
    path = tmp_path / "run.yml"
    path.write_text(
        "optimizer: {lr: 1e-4, min_lr: 1.0e-5}\n"
        "train: {time_limit: 01:30:00, recompute: none, compile: true}\n"
        "checkpoint: {dir: '007', keep: 3}\n"
        "log: {wandb: off, jsonl: ~, tensorboard: }\n"
        "zero: {reduce_bucket_size: 5e8}\n"
    )
    config = load(f"--config {path}")
    assert (config.optimizer.lr, config.optimizer.min_lr) == (1e-4, 1e-5)
    assert config.train.time_limit == 90
    assert config.train.recompute == "none" and config.train.compile is True
    assert config.checkpoint.dir == "007"
    assert config.log.wandb == "off" and config.log.jsonl is None and config.log.tensorboard is None
    assert config.zero.reduce_bucket_size == 500_000_000


@pytest.mark.parametrize("text, minutes", [("90", 90), ("0.5", 0.5), ("01:30:30", 90.5), ("1-02:00:00", 1560)])
def test_time_limit(text, minutes):
    assert load(f"--train.time_limit {text} --checkpoint.dir d").train.time_limit == minutes


def test_fields_of_a_preset_can_be_changed_inside():
    config = load("--model.preset llama3.1-8b --model.rope_scaling.factor 16")
    assert config.model.rope_scaling.factor == 16
    assert config.model.rope_scaling.type == "llama3"
    assert load("--model.preset llama3.1-8b").model.rope_scaling.factor == 8


@pytest.mark.parametrize("preset", ["gpt2-124m", "llama3.2-1b", "qwen3-0.6b"])
def test_what_is_dumped_loads_again(preset, tmp_path):
    config = load(f"--model.preset {preset} --data.train 0.5 a 0.5 b --train.time_limit 10 --checkpoint.dir d")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.model_dump(mode="json")))
    assert load(f"--config {path}") == config


def test_layout_and_what_follows_from_it():
    config = load("--parallel.tp 2 --parallel.pp 3 --train.global_batch_size 24 --train.micro_batch_size 2")
    layout = config.layout(12)
    assert (layout.tp, layout.pp, layout.dp, layout.world_size) == (2, 3, 2, 12)
    assert config.micro_batches(layout.dp) == 6
    assert config.sequence_parallel is True


@pytest.mark.parametrize(
    "flags, expected",
    [
        ("", False),
        ("--parallel.tp 2", True),
        ("--parallel.tp 2 --data.seq_length 33", False),
        ("--parallel.tp 2 --parallel.sequence_parallel false", False),
        ("--parallel.tp 2 --parallel.sequence_parallel true", True),
    ],
)
def test_sequence_parallel_auto(flags, expected):
    assert load(flags).sequence_parallel is expected


def test_help_prints_every_field_with_default_and_meaning(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/some/where/gpt.py"])
    with pytest.raises(SystemExit) as caught:
        load_config(["--train.steps", "3", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: gpt.py [--config FILE]")
    plain = " ".join(text.split())
    for path, field in fields(Config):
        assert f"--{path} " in text
        assert field.description and field.description in plain, path
    assert "--train.timeout  a number\n      seconds" in text and "(default: 600)" in text


def test_a_config_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        Config().train.steps = 3

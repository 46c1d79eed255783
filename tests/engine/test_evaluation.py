"""Evaluation, and what a run writes down: losses against transformers, the same under every layout, unrounded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.engine.tiny import ROOT, open_run, run_script, series, tiny

GPT2 = ROOT / "tests" / "fixtures" / "oracle" / "gpt2-tied" / "hf_init"
SIZES = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings")


def evaluated(corpus: Path, jsonl: Path, changes: dict) -> dict:
    """Settings of two steps that change nothing, from a Hugging Face model, with an evaluation after each."""
    changes = {
        "model.init_from": GPT2,
        "optimizer.lr": 0.0,
        "data.valid": corpus / "valid",
        "data.shuffle": False,
        "train.steps": 2,
        "train.eval_interval": 1,
        "train.eval_steps": 2,
        "log.jsonl": jsonl,
        **changes,
    }
    settings = tiny(corpus, changes)
    return {key: value for key, value in settings.items() if key.removeprefix("model.") not in SIZES}


def expected(prefix: Path, samples: range) -> float:
    """Mean loss over all tokens of these samples, by transformers in float64."""
    from transformers import AutoModelForCausalLM  # not where the ranks would import it too

    model = AutoModelForCausalLM.from_pretrained(GPT2).double().eval()
    stream = torch.from_numpy(np.fromfile(f"{prefix}.bin", np.uint16).astype(np.int64))
    tokens = torch.stack([stream[i * 16 : i * 16 + 17] for i in samples])
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits
    return float(F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))


@pytest.mark.parametrize(
    "world_size, changes",
    [
        (1, {}),
        (4, {"parallel.tp": 2, "parallel.pp": 2}),
        (4, {"parallel.pp": 4, "parallel.schedule": "gpipe", "train.micro_batch_size": 4}),
        (4, {"parallel.pp": 2, "zero.stage": 1, "train.micro_batch_size": 2}),
    ],
    ids=["one process", "tp2 pp2", "pp4", "pp2 dp2"],
)
def test_losses_are_those_of_transformers_and_visible_whatever_the_layout(
    corpus: Path, tmp_path: Path, ranks: Callable, world_size: int, changes: dict
) -> None:
    """Case 23. Two evaluation batches of 8 go past the corpus's 6 samples: each counts once."""
    settings = evaluated(corpus, tmp_path / "metrics.jsonl", changes)
    if world_size == 1:
        run_script(settings)
    else:
        ranks(world_size, run_script, settings)
    held_out = (np.fromfile(corpus / "valid.bin", np.uint16).size - 1) // 16
    assert 0 < held_out < 16
    valid = expected(corpus / "valid", range(held_out))
    evaluations = series(tmp_path / "metrics.jsonl", "valid_loss")
    assert {step: pytest.approx((valid,), rel=2e-6) for step in (1, 2)} == evaluations
    losses = series(tmp_path / "metrics.jsonl", "loss")
    for step in (1, 2):
        train = expected(corpus / "train", range(8 * step - 8, 8 * step))
        assert losses[step] == pytest.approx((train,), rel=2e-6)


def test_metrics_are_unrounded_and_complete(corpus: Path, tmp_path: Path) -> None:
    engine, train, valid = open_run(
        tiny(corpus, {"train.steps": 2, "data.valid": corpus / "valid", "log.jsonl": tmp_path / "metrics.jsonl"})
    )
    with engine:
        first = engine.train_batch(train)
        second = engine.train_batch(train)
        valid_loss = engine.evaluate(valid)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    for line, metrics in zip(lines, (first, second)):
        assert (line["step"], line["loss"], line["grad_norm"], line["lr"], line["consumed_samples"]) == (
            metrics.step,
            float(metrics.loss),
            float(metrics.grad_norm),
            metrics.lr,
            8 * metrics.step,
        )
        assert line["tokens_per_second"] > 0 and line["model_tflops_per_gpu"] > 0
        # A CPU has neither a known peak nor a count of allocated memory.
        assert line["mfu"] is None and line["memory_allocated_peak"] is None
    assert lines[2:] == [{"step": 2, "valid_loss": valid_loss}]


def test_evaluating_changes_nothing(corpus: Path, tmp_path: Path) -> None:
    """With dropout in training: none in evaluation, and its random streams go on as if there had been none."""
    changes = {"train.steps": 3, "model.dropout": 0.2, "model.attention_dropout": 0.2, "data.valid": corpus / "valid"}
    with_evaluation = changes | {"train.eval_interval": 1, "train.eval_steps": 1}
    run_script(
        tiny(corpus, changes | {"log.jsonl": tmp_path / "without.jsonl"}),
        tiny(corpus, with_evaluation | {"log.jsonl": tmp_path / "with.jsonl"}),
    )
    names = ("loss", "grad_norm")
    assert series(tmp_path / "with.jsonl", *names) == series(tmp_path / "without.jsonl", *names)

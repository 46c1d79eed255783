"""Tiny runs for the tests of the engine and of pretrain/gpt.py: their data, their settings, what they leave behind."""

from __future__ import annotations

import json
import os
import random
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from data.loader import BatchSource
from data.sources import build_sources
from megazero.checkpoint import newest, open_checkpoint
from megazero.config import load_config
from megazero.engine import Engine, resolve_model
from megazero.launch.environment import ProcessEnvironment

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "pretrain" / "gpt.py"

Settings = Mapping[str, Any]
"""``section.field`` → value."""


def write_corpus(directory: Path) -> Path:
    """A preprocessed text of 35 samples of 16 tokens in ``directory``/train, and of 6 in ``directory``/valid."""
    draw = random.Random(7)
    words = ["".join(draw.choices("aeinorst", k=draw.randint(1, 6))) for _ in range(40)]
    documents = [" ".join(draw.choices(words, k=12)) for _ in range(14)]
    source = directory / "corpus.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    command = ["data/preprocess.py", "--input", source, "--tokenizer", "byte", "--append-eod"]
    command += ["--output", directory / "train", "--holdout", "0.15", "--holdout-output", directory / "valid"]
    subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, check=True, capture_output=True)
    return directory


def tiny(corpus: Path, changes: Settings) -> dict[str, Any]:
    """Settings of eight steps of a GPT-2 three layers deep and 32 wide, which go round the corpus almost twice."""
    return {
        "model.num_layers": 3,
        "model.hidden_size": 32,
        "model.num_attention_heads": 4,
        "model.vocab_size": 257,
        "model.max_position_embeddings": 16,
        "parallel.vocab_multiple": 8,
        "data.train": corpus / "train",
        "data.seq_length": 16,
        "optimizer.lr": 1e-2,
        "optimizer.warmup_steps": 1,
        "train.steps": 8,
        "train.global_batch_size": 8,
        "train.micro_batch_size": 4,
        "train.precision": "fp32",
        "log.interval": 1,
        **changes,
    }


def flags(settings: Settings) -> list[str]:
    """The settings as the command line has them."""

    def words(value: Any) -> list[str]:
        if isinstance(value, bool):
            return [str(value).lower()]
        return [str(part) for part in value] if isinstance(value, list | tuple) else [str(value)]

    return [word for name, value in settings.items() for word in (f"--{name}", *words(value))]


def run_script(*runs: Settings) -> None:
    """pretrain/gpt.py in this process, which is a rank of whatever group it is in, once for each of ``runs``."""
    before = sys.argv, list(sys.path)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "1")  # never used: where there are several ranks, their group exists
    try:
        for settings in runs:
            sys.argv = [str(SCRIPT), *flags(settings)]
            runpy.run_path(str(SCRIPT), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before


def open_run(settings: Settings) -> tuple[Engine, BatchSource, BatchSource | None]:
    """What pretrain/gpt.py makes, on this rank: the engine, training data, evaluation data."""
    grouped = dist.is_initialized()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
    config = resolve_model(load_config(flags(settings), world_size=world_size), world_size)
    train, valid = build_sources(config.data, vocab_size=config.model.vocab_size)
    return Engine(config, ProcessEnvironment(rank, rank, world_size)), train, valid


def run_script_until_killed(settings: Settings, step: int) -> None:
    """As ``run_script``; the process kills itself after step ``step``."""
    train_batch = Engine.train_batch

    def train_batch_or_die(engine: Engine, source: Any) -> Any:
        if engine.step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return train_batch(engine, source)

    Engine.train_batch = train_batch_or_die
    run_script(settings)


def series(path: Path, *names: str) -> dict[int, tuple[float, ...]]:
    """Step → these numbers, of the lines of a metrics.jsonl that have them. A step must not be there twice."""
    found: dict[int, tuple[float, ...]] = {}
    for line in map(json.loads, path.read_text().splitlines()):
        if all(name in line for name in names):
            assert line["step"] not in found, line
            found[line["step"]] = tuple(line[name] for name in names)
    return found


def state(path: Path) -> dict[tuple[str, str], torch.Tensor]:
    """(kind, global name) → tensor, of the newest checkpoint under ``path``."""
    with open_checkpoint(path) as checkpoint:
        checkpoint.verify()
        kinds = ("weight", "exp_avg", "exp_avg_sq")
        return {(kind, name): checkpoint.read(kind, name) for kind in kinds for name in checkpoint.parameters}


def rank_files(path: Path) -> dict[str, bytes]:
    """The bytes of every rank's file in the newest checkpoint under ``path``: weights, moments, random state."""
    return {file.name: file.read_bytes() for file in newest(path).glob("rank_*.safetensors")}


def steps_in(directory: Path) -> list[int]:
    """Steps of the checkpoints in a directory."""
    return sorted(int(path.name.removeprefix("step_")) for path in directory.glob("step_*"))


def assert_close(found: Mapping[Any, Sequence[float]], wanted: Mapping[Any, Sequence[float]]) -> None:
    """(loss, gradient norm) of each step within float32 rounding: 2e-6 and 5e-5, relative."""
    assert found.keys() == wanted.keys()
    for step, (loss, norm) in wanted.items():
        assert abs(found[step][0] - loss) <= 2e-6 * loss, (step, found[step][0], loss)
        assert abs(found[step][1] - norm) <= 5e-5 * norm, (step, found[step][1], norm)


def assert_weights_close(found: Mapping[Any, torch.Tensor], wanted: Mapping[Any, torch.Tensor]) -> None:
    """Weights within 1e-4 of each tensor's norm, but for the keys' biases: they cancel in the softmax, so that their
    gradients are rounding alone, which Adam scales up."""
    assert found.keys() == wanted.keys()
    for (kind, name), tensor in wanted.items():
        if kind == "weight" and not name.endswith("attention.k.bias"):
            assert (found[kind, name] - tensor).norm() <= 1e-4 * tensor.norm(), name

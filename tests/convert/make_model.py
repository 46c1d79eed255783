"""What the tests of imports share: checkpoints unpacked, a model of imported weights, a run that goes on from them."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import torch

from megazero.checkpoint import save
from megazero.config import load_config
from megazero.convert.foreign import TrainingState
from megazero.engine import Engine
from megazero.launch.environment import ProcessEnvironment
from megazero.models.context import build_context
from megazero.models.gpt import GPT
from megazero.models.parts import attention_parts, mlp_parts
from tests.engine.tiny import flags

FIXTURES = Path(__file__).parent / "fixtures"


def unpack(name: str, target: Path) -> Path:
    """The checkpoints of fixtures/NAME.tar.xz, a folder per case."""
    with tarfile.open(FIXTURES / f"{name}.tar.xz") as archive:
        archive.extractall(target, filter="data")
    return target


def logits(weights: Any, tokens: torch.Tensor) -> torch.Tensor:
    """(B, S) tokens → (B, S, V), by our own model with imported weights."""
    config, read = weights.config, weights.read
    tensors = {name: read(name) for name in weights.parameters}
    for module, parts in (("attention.qkv", attention_parts(config)), ("mlp.inner", mlp_parts(config))):
        for layer in range(config.num_layers):
            for kind in ("weight", "bias"):
                place = f"layers.{layer}.{module.split('.')[0]}"
                names = [f"{place}.{part.name}.{kind}" for part in parts]
                if names[0] in tensors:
                    tensors[f"layers.{layer}.{module}.{kind}"] = torch.cat([tensors.pop(name) for name in names])
    if config.tie_word_embeddings:
        tensors["head.weight"] = tensors["embedding.word.weight"]
    model = GPT(config)
    model.load_state_dict(tensors, strict=True)
    with torch.no_grad():
        x_TH = model(tokens.flatten(), build_context(config, tokens.shape[1], len(tokens)))
        return model.head(x_TH).view(*tokens.shape, -1)


class _Source:
    """Given batches, one after the other from sample ``first`` on."""

    def __init__(self, batches: torch.Tensor, first: int) -> None:
        self._batches, self._first = batches, first

    def read(self, first: int, dp_rank: int, dp_size: int, total: int, micro: int) -> list[dict[str, torch.Tensor]]:
        tokens = self._batches[(first - self._first) // total]
        assert (dp_size, micro) == (1, len(tokens))
        samples = torch.arange(first, first + total)
        return [{"tokens": tokens, "weights": torch.ones(total, tokens.shape[1] - 1), "samples": samples}]


def losses_after(training: TrainingState, batches: torch.Tensor, directory: Path) -> list[float]:
    """Losses of the steps on (N, B, S + 1) tokens, by a run that resumes from the imported checkpoint.

    AdamW is torch's default one at a constant rate of 0.01 and a decay of 0.1; gradients are clipped to 1.
    """
    save(directory, training.step, training.chunks(), meta=training.meta())
    steps, size, length = batches.shape
    settings = {
        **{f"model.{name}": value for name, value in training.config.model_dump(exclude_none=True).items()},
        "data.train": "unread",
        "data.seq_length": length - 1,
        "train.steps": training.step + steps,
        "train.global_batch_size": size,
        "train.micro_batch_size": size,
        "train.precision": "fp32",
        "train.compile": False,
        "checkpoint.dir": directory,
        "checkpoint.save_interval": 0,
        "log.interval": 1,
        "optimizer.schedule": "constant",
        "optimizer.warmup_steps": 0,
        "optimizer.lr": 0.01,
        "optimizer.weight_decay": 0.1,
        "optimizer.betas": [0.9, 0.999],
        "optimizer.eps": 1e-8,
        "optimizer.clip_grad_norm": 1.0,
    }
    source = _Source(batches, training.consumed_samples)
    with Engine(load_config(flags(settings), world_size=1), ProcessEnvironment(0, 0, 1)) as engine:
        assert (engine.step, engine.consumed_samples) == (training.step, training.consumed_samples)
        return [float(engine.train_batch(source).loss) for _ in range(steps)]

"""Speed of the model in a plain loop, without megazero's engine: what tools/benchmark.py --beside-plain-loop runs.

    python tools/plain_loop.py --model.preset gpt2-124m --train.micro_batch_size 8 --train.global_batch_size 8 ...

Settings are those of tools/benchmark.py; those of layouts, ZeRO and recompute say nothing here, and fp16 and others
under which the engine does other work are refused. One process: the decoder of megazero/models as it is, compiled whole
on a GPU with cuDNN's attention, torch's cross-entropy over all logits, weights and gradients in the precision of the
run, float32 masters and moments under torch's fused AdamW, gradients added up and clipped in float32. Prints a JSON
line.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F

from megazero.build import DTYPES, attention_backends, compiles_on, precision_on
from megazero.config import Config
from megazero.convert import open_weights
from megazero.errors import CommandLine, ConfigError
from megazero.launch.errors import report_errors
from megazero.models.context import Context, ContextBuilder
from megazero.models.gpt import GPT
from megazero.models.init import draw
from megazero.optim.schedule import learning_rate
from tools.benchmark import RandomTokens, check_steps, load_settings


class PlainLoop:
    """Trains as the engine does on one process; ``step`` takes the same micro-batches."""

    def __init__(self, config: Config, device: torch.device) -> None:
        _check(config, device)
        self._config, self._device = config, device
        model = config.model.architecture
        with torch.device(device):
            self.model = GPT(model)
        _fill(self.model, config)
        torch.manual_seed(config.train.seed * 1_000_003)  # attention's dropout, as the engine seeds it
        self.model.to(DTYPES[precision_on(config, device)])
        self._contexts = ContextBuilder(model, config.data.seq_length, device, config.train.seed)
        self._parameters = list(self.model.parameters())
        self._masters = [p.detach().float().requires_grad_() for p in self._parameters]
        for master in self._masters:
            master.grad = torch.zeros_like(master)
        asked = config.optimizer
        decay = [
            {"params": [m for m in self._masters if m.dim() > 1], "weight_decay": asked.weight_decay},
            {"params": [m for m in self._masters if m.dim() <= 1], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(decay, lr=asked.lr, betas=asked.betas, eps=asked.eps, fused=True)
        compiles = compiles_on(config, device)
        self._loss = torch.compile(self._plain_loss, dynamic=False) if compiles else self._plain_loss
        self._steps = 0

    def _plain_loss(self, tokens_BS1: torch.Tensor, context: Context) -> torch.Tensor:
        x_TH = self.model(tokens_BS1[:, :-1].flatten(), context)
        return F.cross_entropy(self.model.head(x_TH).float(), tokens_BS1[:, 1:].flatten())

    def step(self, micro_batches: Sequence[dict[str, torch.Tensor]]) -> torch.Tensor:
        """One update; the mean loss, a scalar on the device."""
        total = torch.zeros((), device=self._device)
        gradients = [master.grad for master in self._masters]
        for i, micro_batch in enumerate(micro_batches):
            tokens, samples = (micro_batch[name].to(self._device, non_blocking=True) for name in ("tokens", "samples"))
            context = self._contexts(tokens.shape[0], samples=samples)
            with attention_backends(self._device, deterministic=False):
                loss = self._loss(tokens, context) / len(micro_batches)
            loss.backward()
            own = [parameter.grad for parameter in self._parameters]
            (torch._foreach_add_ if i else torch._foreach_copy_)(gradients, own)
            for parameter in self._parameters:
                parameter.grad = None
            total += loss.detach()
        self._update()
        return total

    @torch.no_grad()
    def _update(self) -> None:
        self._steps += 1
        asked = self._config.optimizer
        if asked.clip_grad_norm:
            torch.nn.utils.clip_grad_norm_(self._masters, asked.clip_grad_norm)
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate(asked, self._steps, self._config.train.steps)
        self._adamw.step()
        torch._foreach_copy_(self._parameters, self._masters)


def _check(config: Config, device: torch.device) -> None:
    """ConfigError for settings under which the engine's work is another than the loop's."""
    train = config.train
    for field, other, instead in (
        ("train.precision", precision_on(config, device) == "fp16", "the loop scales no loss; use bf16"),
        ("train.grad_dtype", train.grad_dtype != "fp32", "the loop adds gradients up in float32; leave it out"),
        ("train.deterministic", train.deterministic, "the loop's kernels are not; leave it out"),
    ):
        if other:
            raise ConfigError.single(field, f"{getattr(train, field.removeprefix('train.'))}: {instead}")


@torch.no_grad()
def _fill(model: GPT, config: Config) -> None:
    """The engine's initial weights: a fused matrix is put together from its parts."""
    weights = open_weights(config.model.init_from) if config.model.init_from else None
    for name, parameter in model.named_parameters():
        path, _, kind = name.rpartition(".")
        module, stem = model.get_submodule(path), path.rpartition(".")[0]
        shapes = {name: tuple(parameter.shape)}
        if hasattr(module, "parts"):
            shapes = {f"{stem}.{part.name}.{kind}": (part.size, *parameter.shape[1:]) for part in module.parts}
        parts = [
            draw(model.config, each, shape, config.train.seed, parameter.device)
            if weights is None
            else weights.read(each)
            for each, shape in shapes.items()
        ]
        parameter.copy_(torch.cat(parts))


def measure(config: Config, device: torch.device, warmup: int, steps: int) -> tuple[float, list[float]]:
    """(seconds per step over ``steps`` steps after ``warmup`` that do not count, the losses of all)."""
    loop, source = PlainLoop(config, device), RandomTokens(config.model.vocab_size, config.data.seq_length)
    batch, losses, begin = config.train.global_batch_size, [], 0.0
    for i in range(warmup + steps):
        if i == warmup:
            _synchronise(device)
            begin = time.perf_counter()
        losses.append(loop.step(source.read(i * batch, 0, 1, batch, config.train.micro_batch_size)))
    _synchronise(device)
    return (time.perf_counter() - begin) / steps, [float(loss) for loss in losses]


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(argv: Sequence[str]) -> None:
    parser = CommandLine(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--warmup", type=int, default=10, help="steps before the clock starts (default: 10)")
    parser.add_argument("--measure", type=int, default=20, help="steps that are timed (default: 20)")
    own, settings = parser.parse_beside_settings(argv)
    check_steps(own, warmup=0, measure=1)
    config = load_settings(settings, own.warmup + own.measure, world_size=1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    seconds, losses = measure(config, device, own.warmup, own.measure)
    tokens = config.train.global_batch_size * config.data.seq_length / seconds
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    found = {"seconds_per_step": seconds, "tokens_per_second": tokens, "memory_allocated_peak": peak, "losses": losses}
    print(json.dumps({"command": shlex.join(["tools/plain_loop.py", *argv]), **found}))


if __name__ == "__main__":
    with report_errors():
        main(sys.argv[1:])

"""What is kept off CUDA devices: P1 in float32, and that memory and copies are what they are said to be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import megazero
from megazero.host_memory import HostMemory
from megazero.zero.offload.link import Link
from tests.engine.tiny import (
    ROOT,
    SCRIPT,
    assert_close,
    assert_weights_close,
    flags,
    open_run,
    run_script,
    series,
    state,
    tiny,
)
from tests.foreign import models

pytestmark = pytest.mark.gpu(1)

STATE, PARAMETERS = {"zero.offload_optimizer.device": "cpu"}, {"zero.offload_param.device": "cpu"}
FEW = {"zero.stage3_param_persistence_threshold": 100, "zero.offload_optimizer.buffer_size": 1024}


def ways(directory: Path) -> dict[str, dict[str, Any]]:
    disk = {"zero.offload_optimizer.device": "nvme", "zero.offload_optimizer.nvme_path": directory / "files"}
    parameters = {"zero.offload_param.device": "nvme", "zero.offload_param.nvme_path": directory / "files"}
    return {
        "stage 1": {"zero.stage": 1, **STATE},
        "stage 2, a half": {"zero.stage": 2, **STATE, "zero.offload_optimizer.ratio": 0.5},
        "stage 3, all": {"zero.stage": 3, **STATE, **PARAMETERS},
        "stage 3, parameters": {"zero.stage": 3, **PARAMETERS},
        "stage 3, files": {"zero.stage": 3, **disk, **PARAMETERS},
        "stage 3, all in files": {"zero.stage": 3, **disk, **parameters},
        "stage 3, parameters in files": {"zero.stage": 3, **parameters},
        "stage 2, unpinned": {"zero.stage": 2, **STATE, "zero.offload_optimizer.pin_memory": False},
    }


@pytest.mark.parametrize("way", ways(Path()))
@pytest.mark.parametrize("micro", [2, 8])
def test_a_run_is_the_one_without(corpus: Path, tmp_path: Path, way: str, micro: int) -> None:
    """In float32, with accumulation and without; compiled too."""
    common = {"train.compile": micro == 8, "train.micro_batch_size": micro}
    plain, off = (
        common | {"checkpoint.dir": tmp_path / name, "log.jsonl": tmp_path / f"{name}.jsonl"}
        for name in ("plain", "off")
    )
    run_script(tiny(corpus, plain), tiny(corpus, off | FEW | ways(tmp_path)[way]))
    names = ("loss", "grad_norm")
    assert_close(series(tmp_path / "off.jsonl", *names), series(tmp_path / "plain.jsonl", *names))
    assert_weights_close(state(tmp_path / "off"), state(tmp_path / "plain"))


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    "changes",
    [
        {"zero.stage": 1, **STATE},
        {"zero.stage": 2, **STATE, "train.micro_batch_size": 1},
        {"zero.stage": 3, **STATE, **PARAMETERS},
        {"zero.stage": 1, **STATE, "parallel.tp": 2},
        {"zero.stage": 3, **STATE, **PARAMETERS, "parallel.pp": 2},
    ],
    ids=["dp2 zero1", "dp2 zero2", "dp2 zero3", "tp2", "pp2"],
)
def test_two_gpus(corpus: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    common = {"train.compile": False, "train.micro_batch_size": 2, "model.num_layers": 4}
    one, two = (
        common | {"checkpoint.dir": tmp_path / name, "log.jsonl": tmp_path / f"{name}.jsonl"} for name in ("one", "two")
    )
    run_script(tiny(corpus, one))
    command = ["-m", "megazero", "launch", "--nproc", "2", str(SCRIPT), *flags(tiny(corpus, two | FEW | changes))]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    names = ("loss", "grad_norm")
    assert_close(series(tmp_path / "two.jsonl", *names), series(tmp_path / "one.jsonl", *names))
    assert_weights_close(state(tmp_path / "two"), state(tmp_path / "one"))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_foreign_model(stage: int) -> None:
    """bfloat16 on one GPU, against the same without offload: the host's kernel rounds a few last bits otherwise."""
    found = []
    parameters = {"device": "cpu" if stage == 3 else "none"}
    for zero in ({}, {"offload_optimizer": {"device": "cpu"}, "offload_param": parameters}):
        settings = models.config(stage, 2, 0.5, zero_optimization=zero, optimizer=models.ADAMW, bf16={"enabled": True})
        found.append(models.trained(models.Odd, settings, 3))
    (losses, norms, weights), (true_losses, true_norms, true_weights) = found[1], found[0]
    assert losses == pytest.approx(true_losses, rel=1e-2) and norms == pytest.approx(true_norms, rel=2e-2)
    for name, value in true_weights.items():
        assert (weights[name] - value).norm() <= 2e-2 * value.norm(), name


def test_memory_does_not_grow_and_nothing_is_pinned_twice(corpus: Path) -> None:
    """What is taken after the third step is what is there at the end; only what is copied is pinned, once."""
    changes = {"zero.stage": 3, **STATE, **PARAMETERS, **FEW, "train.steps": 40, "train.precision": "bf16"}
    engine, train, _ = open_run(tiny(corpus, {**changes, "train.micro_batch_size": 2, "log.interval": 0}))
    with engine:
        tier, taken = engine.stage.sharded.tier, []
        while engine.running():
            engine.train_batch(train)
            taken.append((tier.memory.taken, tier.memory.pinned))
        blocks = engine.stage.sharded.blocks
        copied = [block.host_grad.values for block in blocks] + [block.values for block in blocks if block.values_leave]
        copied += [block.master for block in blocks if block.sends_masters]
        assert all(tensor.is_pinned() for tensor in copied)
        assert not any(block.owned_state("exp_avg").is_pinned() for block in blocks)
        slots = tier.settings.buffer_count * tier.settings.buffer_size * 4
        pinned = sum(tensor.nbytes for tensor in copied)
        assert pinned <= tier.memory.pinned <= pinned + slots
    assert taken[3] == taken[-1]


def test_copies_are_asynchronous_and_in_order() -> None:
    """A copy out waits for what computes its source, and a copy back for the copy out; the host waits for neither."""
    device = torch.device("cuda", torch.cuda.current_device())
    memory = HostMemory(device)
    link = Link(device, memory, 2, 1024)
    host = memory.empty(1 << 20, torch.float32, pin=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    source = torch.full((1 << 20,), 3.0, device=device)
    out = link.out(host, source)
    target = torch.empty_like(source)
    back = link.back(target, host, out)
    assert not torch.cuda.current_stream().query()
    back.wait()
    assert float(target.sum()) == 3 * 2**20
    out.wait_on_host()
    assert float(host.sum()) == 3 * 2**20
    values = torch.arange(1024.0)
    several = [link.bring(target[i * 1024 : (i + 1) * 1024], values + i) for i in range(5)]
    several[-1].wait()
    assert torch.equal(target[: 5 * 1024].cpu().view(5, 1024)[:, 0], torch.arange(5.0))


def test_masters_are_rounded_on_the_device() -> None:
    """As the host would round them."""
    device = torch.device("cuda", torch.cuda.current_device())
    memory = HostMemory(device)
    link = Link(device, memory, 2, 1 << 20)
    masters = memory.empty(5 << 20, torch.float32, pin=True).normal_()
    wanted = masters.bfloat16()
    target = torch.zeros(5 << 20, dtype=torch.bfloat16, device=device)
    with link.stream_back():
        torch.cuda._sleep(200_000_000)
    arrivals = [
        link.bring_masters(part, values)
        for part, values in zip(target.split(1 << 20), masters.split(1 << 20), strict=True)
    ]
    assert link.bytes["back"] == masters.nbytes
    arrivals[-1].wait_on_host()
    masters.zero_()
    assert torch.equal(target.cpu(), wanted)


def test_gradients_of_a_step_are_never_there_together() -> None:
    """At stage 2 the peak of a model of many layers is that of a few, whatever the host has issued by then."""
    torch.cuda.empty_cache()
    peaks = []
    for layers in (8, 24):
        model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(layers)))
        zero = {"stage": 2, "reduce_bucket_size": 1, "offload_optimizer": {"device": "cpu"}}
        config = {"train_batch_size": 1, "zero_optimization": zero, "bf16": {"enabled": True}}
        engine, *_ = megazero.initialize(model=model, config=config)
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            engine.backward(engine(torch.randn(4, 1024, device=engine.device, dtype=torch.bfloat16)).float().mean())
            engine.step()
            peaks.append(torch.cuda.max_memory_allocated() - before)
        engine.destroy()
        del engine, model
    layer = 4 * 2**20  # bytes of a float32 gradient
    assert peaks[-1] - peaks[1] < 2 * layer, peaks

"""Checkpoints move between runs that keep their state in different places."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import megazero
from megazero.checkpoint import writer
from megazero.models.config import ModelConfig
from tests.distributed import runs
from tests.distributed.runs import TokenSource, make_engine, random_weights, settings
from tests.distributed.test_cases import GPT2
from tests.foreign import models
from tests.offload.choices import CPU, FILES, in_files, nvme


@mock.patch.object(writer, "MAX_CHUNK_BYTES", 1024)  # so that matrices are cut into runs of rows
def steps_of(trees: list[dict[str, Any]], weights: runs.Weights) -> tuple[list[float], list[runs.Piece]]:
    """On every rank: one run of 5 steps, a part of it under each tree, and the state at its end."""
    source, losses, pieces = TokenSource(37, 12), [], []
    for index, tree in enumerate(trees):
        last = 5 if index == len(trees) - 1 else 2 * (index + 1)
        with make_engine(tree, weights if index == 0 else None) as engine:
            while engine.step < last:
                losses.append(float(engine.train_batch(source).loss))
            engine.save(source)
            pieces = runs.pieces_of(engine)
    return losses, pieces


@pytest.mark.parametrize("world_size", [1, 2])
def test_of_the_gpt(ranks: Callable, world_size: int, tmp_path: Path) -> None:
    """Case 36: two ranks save at once; the run that moves from host memory to files to the device is the one that
    never stopped, to the bit."""

    def tree(directory: str, zero: dict[str, Any], **checkpoint: Any) -> dict[str, Any]:
        place = {"dir": str(tmp_path / directory), **checkpoint}
        return settings(GPT2, zero={"stage": 3, **zero}, train={"steps": 5}, checkpoint=place)

    ways = [{"offload_optimizer": CPU}, nvme(tmp_path / "files") | in_files(FILES, tmp_path / "files"), {}]
    weights = random_weights(ModelConfig(**GPT2))
    moved = ranks(world_size, steps_of, [tree("moved", way, async_save=way is ways[0]) for way in ways], weights)
    whole = ranks(world_size, steps_of, [tree("whole", {})], weights)
    for found, wanted in zip(moved, whole, strict=True):
        assert found[0] == wanted[0]
    found, wanted = (runs.assemble([pieces for _, pieces in results]) for results in (moved, whole))
    for kind in wanted:
        assert all(torch.equal(found[kind][name], value) for name, value in wanted[kind].items())


@mock.patch.object(writer, "MAX_CHUNK_BYTES", 64)
def foreign(ways: list[dict[str, Any]], directory: str | None) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """On every rank: a step under each way, with a checkpoint between two of them where there is a directory for it."""
    results: list[Any] = []
    engine = None
    for step, way in enumerate(ways):
        if engine is None or directory is not None:
            optimizer = {"type": "AdamW", "params": {"lr": 3e-3}}
            config = models.config(2, 1, 0.5, zero_optimization=way, optimizer=optimizer, bf16={"enabled": True})
            engine, *_ = megazero.initialize(model=models.build(models.Odd), config=copy.deepcopy(config))
            if step:
                engine.load_checkpoint(directory)
        loss = models.loss_of(engine, models.batch(step, 0, engine.global_rank))
        engine.backward(loss)
        engine.step()
        if directory is not None:
            engine.save_checkpoint(directory)
        results.append((float(loss), models.whole_weights(engine)))
        if directory is not None:
            engine.destroy()
    return results


@pytest.mark.parametrize("world_size", [1, 2])
def test_of_a_foreign_model(ranks: Callable, world_size: int, tmp_path: Path) -> None:
    cpu = {"offload_optimizer": {"device": "cpu"}}
    disk = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path / "files")}}
    moved = ranks(world_size, foreign, [cpu, disk, {}, disk, cpu], str(tmp_path / "checkpoints"))
    whole = ranks(world_size, foreign, [{}] * 5, None)
    for found, wanted in zip(moved, whole, strict=True):
        for (loss, weights), (true_loss, true_weights) in zip(found, wanted, strict=True):
            assert loss == true_loss
            assert all(torch.equal(weights[name], value) for name, value in true_weights.items())


def test_whole_state_of_a_parameter_is_read_and_set(tmp_path: Path) -> None:
    """megazero.zero's safe_get and safe_set functions find the state in host memory and in files."""
    for way in ({"offload_optimizer": {"device": "cpu"}}, nvme_of(tmp_path), in_files(FILES, tmp_path)):
        config = models.config(
            3 if "offload_param" in way else 2,
            1,
            0.5,
            zero_optimization=way,
            optimizer=models.ADAMW,
            bf16={"enabled": True},
        )
        engine, *_ = megazero.initialize(model=models.build(models.Odd), config=config)
        engine.backward(models.loss_of(engine, models.batch(0, 0, 0)))
        parameter = engine.module.twice.weight
        gradient = megazero.zero.safe_get_full_grad(parameter)
        engine.step()
        factor = min(1.0, 0.5 / (engine.get_global_grad_norm() + 1e-6))
        moment = megazero.zero.safe_get_full_optimizer_state(parameter, "exp_avg")
        torch.testing.assert_close(moment, 0.1 * gradient * factor, rtol=1e-6, atol=1e-12)
        for value in (torch.arange(36.0).view(6, 6), torch.ones(6, 6)):
            megazero.zero.safe_set_full_optimizer_state(parameter, value, "exp_avg_sq")
            assert torch.equal(megazero.zero.safe_get_full_optimizer_state(parameter, "exp_avg_sq"), value)
            megazero.zero.safe_set_full_fp32_param(parameter, value / 3)
            assert torch.equal(megazero.zero.safe_get_full_fp32_param(parameter), value / 3)
        engine.destroy()


def test_the_optimizer_s_own_state_is_taken_back_and_forgotten(tmp_path: Path) -> None:
    """state_dict and load_state_dict, an emptied ``state``, and a checkpoint of before the first step: each goes on as
    the run did from there, wherever the moments are."""

    def losses(engine: Any, first: int, weights: dict[str, torch.Tensor] | None = None) -> list[float]:
        for name, value in (weights or {}).items():
            megazero.zero.safe_set_full_fp32_param(engine.module.get_parameter(name), value)
        found = []
        for step in range(first, first + 3):
            found.append(models.loss_of(engine, models.batch(step, 0, 0)))
            engine.backward(found[-1])
            engine.step()
        return [loss.item() for loss in found]

    for number, way in enumerate(({}, {"offload_optimizer": {"device": "cpu"}}, nvme_of(tmp_path / "files"))):
        config = models.config(2, 1, 0.5, zero_optimization=way, optimizer=models.ADAMW)
        engine, optimizer, *_ = megazero.initialize(model=models.build(models.Odd), config=config)
        engine.save_checkpoint(tmp_path / str(number))
        new = models.whole_weights(engine)
        from_start = losses(engine, 0)
        weights, state = models.whole_weights(engine), copy.deepcopy(optimizer.state_dict())
        onwards = losses(engine, 3)
        optimizer.load_state_dict(state)
        assert losses(engine, 3, weights) == onwards, way
        optimizer.state.clear()
        assert losses(engine, 0, new) == from_start, way
        engine.load_checkpoint(tmp_path / str(number))
        assert losses(engine, 0) == from_start, way
        engine.destroy()


def nvme_of(directory: Path) -> dict[str, Any]:
    return {"offload_optimizer": {"device": "nvme", "nvme_path": str(directory)}}

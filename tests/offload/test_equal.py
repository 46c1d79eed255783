"""P1: a run is the same bits whatever is kept off the device; the kernels are the same ones here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megazero.models.config import ModelConfig
from tests.distributed import runs, test_reference_runs
from tests.distributed.runs import Outcome, TokenSource, random_weights, settings, train
from tests.distributed.test_cases import GPT2
from tests.distributed.test_reference_runs import Choice
from tests.foreign import models
from tests.offload.choices import CPU, FILES, PARAMETERS, in_files, nvme

BUCKETS = {"reduce_bucket_size": 9000, "allgather_bucket_size": 9000}


def outcome(layout: runs.Layout, zero: dict[str, Any], **sections: Any) -> Outcome:
    tree = settings(GPT2, layout, zero={**BUCKETS, **zero}, **sections)
    return train(tree, TokenSource(37, 12), random_weights(ModelConfig(**GPT2)), dp=layout[2])


def assert_same_bits(found: Outcome, wanted: Outcome) -> None:
    assert (found.losses, found.norms) == (wanted.losses, wanted.norms)
    for kind, tensors in wanted.state.items():
        for name, tensor in tensors.items():
            assert torch.equal(found.state[kind][name], tensor), (kind, name)


HALF = {"offload_optimizer": {**CPU, "ratio": 0.5}}
ALL = {"offload_optimizer": CPU}


@pytest.mark.parametrize(
    ("micro", "clip", "precision", "tiers"),
    [
        # (stage, tier); files where there is none, FILES: parameters in one
        (1, 0.5, "fp32", [(1, ALL), (2, HALF), (3, ALL | PARAMETERS), (3, ALL | FILES), (2, None)]),
        (4, 0.5, "fp32", [(1, HALF), (2, ALL), (3, None)]),
        (1, 0.0, "fp32", [(1, None), (2, ALL), (3, HALF | PARAMETERS)]),
        (4, 0.0, "fp32", [(1, ALL), (3, ALL | PARAMETERS), (3, FILES)]),
        (1, 0.5, "bf16", [(1, ALL), (2, None), (3, PARAMETERS), (3, HALF | PARAMETERS), (3, HALF | FILES)]),
        (4, 0.5, "fp16", [(2, HALF), (3, None), (3, ALL | FILES)]),
    ],
)
def test_one_process(micro: int, clip: float, precision: str, tiers: list[tuple[int, dict | None]], tmp_path: Path):
    """Case 33: with accumulation and without, clipped and not, at every stage and tier."""
    sections = {"optimizer": {"clip_grad_norm": clip}}
    sections["train"] = {"precision": precision, "micro_batch_size": micro, "initial_loss_scale": 1024.0}
    wanted: dict[int, Outcome] = {}
    for stage, tier in tiers:
        if stage not in wanted:
            wanted[stage] = outcome((1, 1, 1), {"stage": stage}, **sections)
        tier = nvme(tmp_path, pipeline_read=micro == 1) if tier is None else in_files(tier, tmp_path)
        assert_same_bits(outcome((1, 1, 1), {"stage": stage, **tier}, **sections), wanted[stage])
    assert not [*tmp_path.glob("megazero-*")], "files are left"


@pytest.mark.parametrize(
    ("layout", "zero", "parallel"),
    [
        ((2, 1, 1), {"stage": 1}, {}),
        ((1, 2, 1), {"stage": 1}, {"schedule": "zero_bubble"}),
        ((1, 1, 2), {"stage": 2}, {}),
        ((1, 1, 4), {"stage": 2, "mics_shard_size": 2}, {}),
        ((2, 1, 2), {"stage": 3, **PARAMETERS}, {}),
        ((1, 1, 2), {"stage": 3, **FILES}, {}),
        ((1, 2, 2), {"stage": 3, **PARAMETERS}, {}),
        ((1, 2, 1), {"stage": 1, "activations": True}, {"schedule": "gpipe"}),
    ],
    ids=str,
)
def test_layouts(layout: runs.Layout, zero: dict, parallel: dict, tmp_path: Path) -> None:
    """Case 33 and 36 over tp, pp and dp: tied embeddings on two stages, norms of which ranks have shares."""
    sections = {"train": {"global_batch_size": 4, "micro_batch_size": 1}, "parallel": parallel}
    zero, activations = in_files(zero, tmp_path), {}
    if zero.pop("activations", False):
        sections["train"]["recompute"], activations = "full", {"offload_activations": True}
    wanted = outcome(layout, {k: v for k, v in zero.items() if k not in PARAMETERS}, **sections)
    sections["train"] |= activations
    assert_same_bits(outcome(layout, {"offload_optimizer": {**CPU, "ratio": 0.8}, **zero}, **sections), wanted)


@pytest.mark.parametrize(
    ("choice", "zero"),
    [
        (Choice("gpt2-tied", (1, 1, 2), 2, 2, "1f1b", "none", False), {"offload_optimizer": {**CPU, "ratio": 0.5}}),
        (Choice("gpt2-tied", (1, 2, 1), 3, 2, "1f1b", "full", False), {"offload_optimizer": CPU, **PARAMETERS}),
    ],
    ids=str,
)
def test_the_reference_runs(ranks: Callable, choice: Choice, zero: dict) -> None:
    test_reference_runs.test_a_layout_gives_the_reference_run(
        lambda world_size, function, *arguments, **options: ranks(
            world_size, reference_run_offloaded, *arguments, zero, **options
        ),
        choice,
    )


def reference_run_offloaded(choice: Choice, zero: dict[str, Any]) -> Any:
    config_of = test_reference_runs.config_of

    def offloaded(choice: Choice) -> Any:
        config = config_of(choice)
        return type(config).from_dict(runs.merged(config.model_dump(), {"zero": zero}))

    with mock.patch.object(test_reference_runs, "config_of", offloaded):
        return test_reference_runs.reference_run(choice)


ADAM = {"type": "Adam", "params": {"lr": 3e-3, "weight_decay": 0.1, "adam_w_mode": False}}
SGD = {"type": "SGD", "params": {"lr": 3e-3, "momentum": 0.9}}


def train_foreign(jobs: list[tuple[int, dict, str | None, dict]]) -> list[Any]:
    """On every rank: the numbers and weights of one run after another."""
    results = []
    for stage, optimizer, precision, zero in jobs:
        sections = {precision: {"enabled": True}} if precision else {}
        settings = models.config(stage, 2, 0.5, zero_optimization=zero, optimizer=optimizer, **sections)
        results.append(models.trained(models.Odd, settings, 3))
    return results


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_foreign_model(ranks: Callable, world_size: int, tmp_path: Path) -> None:
    """By DeepSpeed's keys: Adam and AdamW in the offload's thread, others by their own code; parameters of one element,
    frozen, unused and tied ones."""
    cpu = {"offload_optimizer": {"device": "cpu"}}
    disk = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path), "ratio": 0.6}}
    kinds = [
        (1, models.ADAMW, None, cpu),
        (2, ADAM, "bf16", cpu),
        (3, SGD, "fp16", cpu | PARAMETERS),
        (3, models.ADAMW, "bf16", in_files(disk | FILES, tmp_path)),
        (3, SGD, None, in_files(FILES, tmp_path)),
        (2, ADAM, None, disk),
    ]
    jobs = [job for kind in kinds for job in (kind, (*kind[:3], {}))]
    for results in ranks(world_size, train_foreign, jobs):
        for found, wanted in zip(results[::2], results[1::2], strict=True):
            assert found[:2] == wanted[:2]
            assert all(torch.equal(found[2][name], value) for name, value in wanted[2].items())
